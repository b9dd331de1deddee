// This file declares the parts of the ABI of XLA's foreign function interface that this module reads: what XLA hands to
// a handler, and the table of C functions that it offers to one. They are the same in the versions 0.1 to 0.3 of that
// interface, those of jaxlib 0.6 to 0.10 (https://openxla.org/xla/custom_call; jaxlib brings the whole of it as
// xla/ffi/api/c_api.h). So the build needs no JAX, and one build serves them all.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashtile::bindings::xla {

inline constexpr int kMajorVersion = 0, kOldestMinor = 1, kNewestMinor = 3;

enum Type : std::int32_t {
  kBool = 1,
  kInt64 = 5,
  kUint32 = 8,
  kFloat16 = 10,
  kFloat32 = 11,
  kFloat64 = 12,
  kBfloat16 = 16
};
enum AttributeKind : std::int32_t { kScalarAttribute = 3 };
enum ExtensionKind : std::int32_t { kMetadata = 1 };
enum class ErrorCode : std::int32_t { kInvalidArgument = 3, kUnimplemented = 12, kInternal = 13 };

struct Context;   // of one execution
struct Error;     // XLA's own, which whoever receives it destroys
struct Internal;  // of XLA

struct Extension {
  std::size_t bytes;
  ExtensionKind kind;
  Extension* next;
};

/// Every struct begins with this, or with `bytes` alone. `bytes` is its size in the version of whoever made it: newer
/// versions only add fields at the end.
struct Header {
  std::size_t bytes;
  Extension* extensions;
};

struct Version {
  Header header;
  int major;
  int minor;
};

struct Buffer {
  Header header;
  Type type;
  void* data;
  std::int64_t rank;
  std::int64_t* shape;  // row-major
};

struct Scalar {
  Type type;
  void* value;
};

struct Text {
  const char* data;
  std::size_t size;
};

struct Buffers {
  Header header;
  std::int64_t count;
  std::int32_t* kinds;  // 1: a buffer
  void** items;
};

struct Attributes {
  Header header;
  std::int64_t count;
  AttributeKind* kinds;
  Text** names;
  void** items;
};

// Each function of the table takes one of these, and writes its answer into the last field.
struct ErrorOfMessage {
  Header header;
  const char* message;
  ErrorCode code;
};
struct DestroyedError {
  Header header;
  Error* error;
};
struct StreamOf {
  Header header;
  Context* context;
  void* stream;
};
struct Allocation {
  Header header;
  Context* context;
  std::size_t size;
  std::size_t alignment;
  void* data;
};
struct Deallocation {
  Header header;
  Context* context;
  std::size_t size;
  void* data;
};
struct DeviceOf {
  Header header;
  Context* context;
  std::int32_t index;
};

struct Api {
  Header header;
  Version version;
  const Internal* internal;
  Error* (*create_error)(ErrorOfMessage*);
  void* message_of_error;
  void (*destroy_error)(DestroyedError*);
  void* register_handler;
  Error* (*stream)(StreamOf*);
  void* register_type;
  void* get_context;
  void* set_state;
  void* get_state;
  Error* (*allocate)(Allocation*);
  Error* (*deallocate)(Deallocation*);
  void* schedule;
  void* count_threads;
  void* create_future;
  void* fulfil_future;
  void* fail_future;
  void* run;
  Error* (*device)(DeviceOf*);
};

struct CallFrame {
  Header header;
  const Api* api;
  Context* context;
  std::int32_t stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
};

struct Metadata {
  std::size_t bytes;
  Version version;  // the handler's answer
};

struct MetadataExtension {
  Extension extension;
  Metadata* metadata;
};

/// XLA calls a handler to compute, and, with a MetadataExtension, to ask for its version.
using Handler = Error* (*)(CallFrame*);

}  // namespace flashtile::bindings::xla
