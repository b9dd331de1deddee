// This file declares the parts of the DLPack 1.x ABI that this module reads: a tensor description, and the table of C
// functions that a framework offers for exchanging tensors without Python calls
// (https://dmlc.github.io/dlpack/latest/c_api.html).
#pragma once

#include <cstdint>

namespace flashtile::bindings::dlpack {

inline constexpr std::uint32_t kMajorVersion = 1;
inline constexpr const char* kExchangeAttribute = "__dlpack_c_exchange_api__";  // attribute of a tensor type
inline constexpr const char* kExchangeCapsule = "dlpack_exchange_api";

enum DeviceCode : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum TypeCode : std::uint8_t { kInt = 0, kFloat = 2, kBfloat = 4, kE4M3 = 10, kE5M2 = 12 };

struct Device {
  std::int32_t type;
  std::int32_t index;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t rank;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

struct ExchangeHeader {
  std::uint32_t major;
  std::uint32_t minor;
  const ExchangeHeader* previous;  // the table of an older version, or null
};

struct ManagedTensor {
  std::uint32_t major;
  std::uint32_t minor;
  void* manager;
  void (*free)(ManagedTensor* self);  // may be null
  std::uint64_t flags;
  Tensor tensor;
};

using SetError = void (*)(void* context, const char* kind, const char* message);

// These functions return 0, or −1 with a Python exception set; `allocate` calls `set_error` instead.
struct Exchange {
  ExchangeHeader header;
  int (*allocate)(const Tensor* prototype, ManagedTensor** out, void* context, SetError set_error);
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, Tensor* out);  // borrows; may be null
  int (*current_stream)(std::int32_t device_type, std::int32_t device_index, void** out);
};

}  // namespace flashtile::bindings::dlpack
