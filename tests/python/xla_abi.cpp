// This file compiles only if xla_ffi.h, which is the project's own, says what jaxlib's header says.
#include <type_traits>

#include "xla/ffi/api/c_api.h"
#include "xla_ffi.h"

namespace xla = flashtile::bindings::xla;

#define SAME_PLACE(ours, field, theirs, their_field)                                    \
  static_assert(offsetof(xla::ours, field) == offsetof(XLA_FFI_##theirs, their_field)); \
  static_assert(sizeof(std::declval<xla::ours>().field) == sizeof(std::declval<XLA_FFI_##theirs>().their_field))
#define SAME_VALUE(ours, theirs) static_assert(static_cast<int>(xla::ours) == XLA_FFI_##theirs)

static_assert(xla::kMajorVersion == XLA_FFI_API_MAJOR);
SAME_VALUE(kBool, DataType_PRED);
SAME_VALUE(kInt64, DataType_S64);
SAME_VALUE(kUint32, DataType_U32);
SAME_VALUE(kFloat16, DataType_F16);
SAME_VALUE(kFloat32, DataType_F32);
SAME_VALUE(kFloat64, DataType_F64);
SAME_VALUE(kBfloat16, DataType_BF16);
SAME_VALUE(kScalarAttribute, AttrType_SCALAR);
SAME_VALUE(kMetadata, Extension_Metadata);
SAME_VALUE(ErrorCode::kInvalidArgument, Error_Code_INVALID_ARGUMENT);
SAME_VALUE(ErrorCode::kUnimplemented, Error_Code_UNIMPLEMENTED);
SAME_VALUE(ErrorCode::kInternal, Error_Code_INTERNAL);

SAME_PLACE(Extension, kind, Extension_Base, type);
SAME_PLACE(Extension, next, Extension_Base, next);
SAME_PLACE(Version, header.extensions, Api_Version, extension_start);
SAME_PLACE(Version, major, Api_Version, major_version);
SAME_PLACE(Version, minor, Api_Version, minor_version);
SAME_PLACE(Buffer, type, Buffer, dtype);
SAME_PLACE(Buffer, data, Buffer, data);
SAME_PLACE(Buffer, rank, Buffer, rank);
SAME_PLACE(Buffer, shape, Buffer, dims);
SAME_PLACE(Scalar, type, Scalar, dtype);
SAME_PLACE(Scalar, value, Scalar, value);
SAME_PLACE(Text, data, ByteSpan, ptr);
SAME_PLACE(Text, size, ByteSpan, len);
SAME_PLACE(Buffers, count, Args, size);
SAME_PLACE(Buffers, items, Args, args);
SAME_PLACE(Buffers, count, Rets, size);
SAME_PLACE(Buffers, items, Rets, rets);
SAME_PLACE(Attributes, count, Attrs, size);
SAME_PLACE(Attributes, kinds, Attrs, types);
SAME_PLACE(Attributes, names, Attrs, names);
SAME_PLACE(Attributes, items, Attrs, attrs);
SAME_PLACE(ErrorOfMessage, message, Error_Create_Args, message);
SAME_PLACE(ErrorOfMessage, code, Error_Create_Args, errc);
SAME_PLACE(DestroyedError, error, Error_Destroy_Args, error);
SAME_PLACE(StreamOf, context, Stream_Get_Args, ctx);
SAME_PLACE(StreamOf, stream, Stream_Get_Args, stream);
SAME_PLACE(DeviceOf, context, DeviceOrdinal_Get_Args, ctx);
SAME_PLACE(DeviceOf, index, DeviceOrdinal_Get_Args, device_ordinal);
SAME_PLACE(Allocation, context, DeviceMemory_Allocate_Args, ctx);
SAME_PLACE(Allocation, size, DeviceMemory_Allocate_Args, size);
SAME_PLACE(Allocation, alignment, DeviceMemory_Allocate_Args, alignment);
SAME_PLACE(Allocation, data, DeviceMemory_Allocate_Args, data);
SAME_PLACE(Deallocation, context, DeviceMemory_Free_Args, ctx);
SAME_PLACE(Deallocation, size, DeviceMemory_Free_Args, size);
SAME_PLACE(Deallocation, data, DeviceMemory_Free_Args, data);
SAME_PLACE(Api, version, Api, api_version);
SAME_PLACE(Api, create_error, Api, XLA_FFI_Error_Create);
SAME_PLACE(Api, destroy_error, Api, XLA_FFI_Error_Destroy);
SAME_PLACE(Api, stream, Api, XLA_FFI_Stream_Get);
SAME_PLACE(Api, allocate, Api, XLA_FFI_DeviceMemory_Allocate);
SAME_PLACE(Api, deallocate, Api, XLA_FFI_DeviceMemory_Free);
SAME_PLACE(Api, device, Api, XLA_FFI_DeviceOrdinal_Get);
SAME_PLACE(CallFrame, header.extensions, CallFrame, extension_start);
SAME_PLACE(CallFrame, api, CallFrame, api);
SAME_PLACE(CallFrame, context, CallFrame, ctx);
SAME_PLACE(CallFrame, arguments, CallFrame, args);
SAME_PLACE(CallFrame, results, CallFrame, rets);
SAME_PLACE(CallFrame, attributes, CallFrame, attrs);
SAME_PLACE(Metadata, version, Metadata, api_version);
SAME_PLACE(MetadataExtension, metadata, Metadata_Extension, metadata);
