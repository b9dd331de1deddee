// This file has two ways from a Python tensor to a TensorView: the DLPack exchange table of its type (0.05 µs a tensor;
// PyTorch has one from 2.10 on), else its Python attributes (2 µs).
#include "tensor.h"

#include <algorithm>
#include <string>
#include <utility>

#include "call.h"
#include "dlpack.h"
#include "flashtile/error.h"
#include "negation.h"

namespace flashtile::bindings {
namespace {

bool exchange_enabled = true;

/// Capsules that hidden_memory makes have this name. DLPack's own capsules are not accepted: anyone may have made
/// those.
constexpr const char* kHiddenMemory = "flashtile_hidden_memory";

dlpack::ManagedTensor* held_by(PyObject* hidden_memory) {
  return static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(hidden_memory, kHiddenMemory));
}

[[noreturn]] void not_a_tensor(const char* function, const char* name, nb::handle object) {
  throw InvalidType(std::string(function) + ": " + name + " is of type " + nb::type_name(object.type()).c_str() +
                    ", expected a torch.Tensor");
}

/// Takes the Python error that is set and throws it as one that names the argument.
[[noreturn]] void not_viewable(const char* function, const char* name) {
  const nb::python_error error;
  const std::string reason = nb::str(error.value()).c_str();
  throw InvalidType(std::string(function) + ": " + name + " is not a dense strided tensor (" +
                    reason.substr(0, reason.find('\n')) + ")");
}

[[noreturn]] void rank_too_high(const char* function, const char* name, const std::int64_t* shape, int rank) {
  throw InvalidArgument(std::string(function) + ": " + name + " has shape " + shape_string(shape, rank) +
                        ", expected at most " + std::to_string(kMaxRank) + " dimensions");
}

[[noreturn]] void negated(const char* function, const char* name) {
  throw Unreadable(std::string(function) + ": " + name +
                   " is negated lazily (is_neg()), expected a tensor whose memory holds its numbers, as resolve_neg() "
                   "returns it");
}

/// Returns the view if the core can read it, and throws InvalidType otherwise.
TensorView readable(const char* function, const char* name, nb::handle object, const char* dtypes,
                    const TensorView& view) {
  const auto prefix = [&] { return std::string(function) + ": " + name; };
  if (view.dtype == DType::kOther) {
    const nb::object dtype = object.attr("dtype");
    throw InvalidType(prefix() + " has dtype " + nb::str(dtype).c_str() + ", expected " + dtypes);
  }
  // PyTorch's meta and fake tensors have a shape and no memory.
  if (!view.data && !view.empty() && view.device.type != DeviceType::kOther)
    throw InvalidType(prefix() + " has no memory, expected a tensor with data");
  return view;
}

// ---- These functions view a tensor by its attributes.

Device device_by_attribute(nb::handle device) {
  const std::string type = nb::cast<nb::str>(device.attr("type")).c_str();
  const nb::object index = device.attr("index");
  if (type == "cpu") return {DeviceType::kCpu, 0};
  return {type == "cuda" ? DeviceType::kCuda : DeviceType::kOther, index.is_none() ? 0 : nb::cast<int>(index)};
}

TensorView view_by_attributes(const char* function, const char* name, nb::handle object) {
  if (!nb::hasattr(object, "data_ptr") || !nb::hasattr(object, "stride")) not_a_tensor(function, name, object);
  TensorView view;
  try {
    const nb::object shape = object.attr("shape");
    const nb::object strides = object.attr("stride")();
    view.rank = static_cast<int>(nb::len(shape));
    if (view.rank > kMaxRank) {
      std::int64_t sizes[8] = {};
      const int shown = std::min(view.rank, 8);
      for (int i = 0; i < shown; ++i) sizes[i] = nb::cast<std::int64_t>(shape[i]);
      rank_too_high(function, name, sizes, shown);
    }
    for (int i = 0; i < view.rank; ++i) {
      view.shape[i] = nb::cast<std::int64_t>(shape[i]);
      view.strides[i] = nb::cast<std::int64_t>(strides[i]);
    }
    view.dtype = to_dtype(object.attr("dtype"));
    view.device = device_by_attribute(object.attr("device"));
    view.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(object.attr("data_ptr")()));
    if (is_negated(object)) negated(function, name);
  } catch (nb::python_error& error) {
    error.restore();
    not_viewable(function, name);
  }
  return view;
}

// ---- These functions view a tensor by the exchange table.

const dlpack::Exchange* find_exchange(nb::handle type) {
  nb::object capsule = nb::getattr(type, dlpack::kExchangeAttribute, nb::none());
  if (capsule.is_none()) return nullptr;
  const void* pointer = PyCapsule_GetPointer(capsule.ptr(), dlpack::kExchangeCapsule);
  if (!pointer) throw nb::python_error();
  auto header = static_cast<const dlpack::ExchangeHeader*>(pointer);
  while (header && header->major != dlpack::kMajorVersion) header = header->previous;
  auto exchange = reinterpret_cast<const dlpack::Exchange*>(header);
  return exchange && exchange->tensor_from_object ? exchange : nullptr;
}

/// Returns whether the table describes numbers of 8 bits. Those of older versions refuse to, which takes them many
/// times as long as a view by attributes.
bool finds_fp8(const dlpack::Exchange& exchange) {
  using namespace nb::literals;
  const nb::object empty = nb::module_::import_("torch").attr("empty");
  const nb::object tensor = empty(0, "dtype"_a = torch_dtype(DType::kE4M3), "device"_a = "cpu");
  dlpack::Tensor shown;
  const bool found = exchange.tensor_from_object(tensor.ptr(), &shown) == 0;
  PyErr_Clear();
  return found;
}

/// This says how tensors of a type are viewed.
struct Source {
  nb::handle type;
  const dlpack::Exchange* exchange = nullptr;  // null: they are viewed by their attributes
  bool knows_fp8 = true;                       // otherwise those of 8 bits are, too
  NegativeBit negative_bit;
};

/// Returns the source for the object's type. It remembers a few types, such as Tensor and Parameter.
const Source& source_of(nb::handle object) {
  static const Source by_attributes;
  if (!exchange_enabled) return by_attributes;
  static Source known[4];
  static unsigned next = 0;
  const nb::handle type = object.type();
  for (const Source& source : known)
    if (source.type.is(type)) return source;
  Source source{.type = type, .exchange = find_exchange(type)};
  if (source.exchange) {
    static const bool knows_fp8 = finds_fp8(*source.exchange);
    source.knows_fp8 = knows_fp8;
    source.negative_bit = NegativeBit::of(type, *source.exchange);
  }
  Source& entry = known[next++ % std::size(known)];
  type.inc_ref();  // a remembered type stays alive, so that no other can take its address
  entry.type.dec_ref();
  entry = source;
  return entry;
}

void release(dlpack::ManagedTensor* memory) {
  if (memory->free) memory->free(memory);
}

DType dtype_of(dlpack::DataType type) {
  if (type.lanes != 1) return DType::kOther;
  if (type.code == dlpack::kBfloat && type.bits == 16) return DType::kBFloat16;
  if (type.code == dlpack::kFloat && type.bits == 16) return DType::kFloat16;
  if (type.code == dlpack::kFloat && type.bits == 32) return DType::kFloat32;
  if (type.code == dlpack::kInt && type.bits == 32) return DType::kInt32;
  if (type.code == dlpack::kE4M3 && type.bits == 8) return DType::kE4M3;
  if (type.code == dlpack::kE5M2 && type.bits == 8) return DType::kE5M2;
  return DType::kOther;
}

Device to_device(dlpack::Device device) {
  switch (device.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost: return {DeviceType::kCpu, 0};
    case dlpack::kCuda:
    case dlpack::kCudaManaged: return {DeviceType::kCuda, device.index};
    default: return {DeviceType::kOther, device.index};
  }
}

TensorView to_view(const dlpack::Tensor& tensor) {
  TensorView view;
  view.data = tensor.data ? static_cast<char*>(tensor.data) + tensor.byte_offset : nullptr;
  view.dtype = dtype_of(tensor.dtype);
  view.device = to_device(tensor.device);
  view.rank = tensor.rank;
  std::copy_n(tensor.shape, tensor.rank, view.shape.begin());
  std::copy_n(tensor.strides, tensor.rank, view.strides.begin());
  return view;
}

TensorView view_by_exchange(const char* function, const char* name, nb::handle object, const Source& source) {
  dlpack::Tensor tensor;
  if (!source.knows_fp8 && is_fp8(to_dtype(nb::getattr(object, "dtype", nb::none()))))
    return view_by_attributes(function, name, object);
  if (source.exchange->tensor_from_object(object.ptr(), &tensor) != 0) not_viewable(function, name);
  if (tensor.rank > kMaxRank) rank_too_high(function, name, tensor.shape, tensor.rank);
  if (source.negative_bit.may_be_set(tensor) && is_negated(object)) negated(function, name);
  return to_view(tensor);
}

/// Returns a view in a call that is only planned, for the device `planned`. The tensor may lie on another device, or
/// nowhere as one of the device "meta": a plan reads no memory but that of tables on a CPU.
TensorView view_for_plan(const char* function, const char* name, nb::handle object, const DeviceInfo& planned) {
  TensorView view = view_by_attributes(function, name, object);
  view.device = planned.device;
  const bool read = view.device.type == DeviceType::kCpu && view.dtype == DType::kInt32;
  if (!view.data && !read) view.data = planned_memory();
  return view;
}

/// PyTorch's dtypes, in the order of DType.
struct TorchDtypes {
  nb::handle all[static_cast<int>(DType::kOther)];

  TorchDtypes() {
    const nb::module_ torch = nb::module_::import_("torch");
    for (int i = 0; i < static_cast<int>(DType::kOther); ++i)
      all[i] = nb::object(torch.attr(name_of(static_cast<DType>(i)))).release();  // lives as long as the process
  }
};

const TorchDtypes& torch_dtypes() {
  static const TorchDtypes dtypes;
  return dtypes;
}

}  // namespace

DType to_dtype(nb::handle dtype) {
  const auto& all = torch_dtypes().all;
  const auto is_dtype = [&](nb::handle other) { return dtype.is(other); };
  return static_cast<DType>(std::find_if(std::begin(all), std::end(all), is_dtype) - std::begin(all));
}

nb::handle torch_dtype(DType dtype) {
  return torch_dtypes().all[static_cast<int>(dtype)];
}

TensorView tensor_view(const char* function, const char* name, nb::handle object, const char* dtypes) {
  if (PyCapsule_IsValid(object.ptr(), kHiddenMemory)) return to_view(held_by(object.ptr())->tensor);
  if (const DeviceInfo* planned = planned_device())
    return readable(function, name, object, dtypes, view_for_plan(function, name, object, *planned));
  const Source& source = source_of(object);
  return readable(
      function, name, object, dtypes,
      source.exchange ? view_by_exchange(function, name, object, source) : view_by_attributes(function, name, object));
}

nb::object hidden_memory(nb::handle like, Device device, std::initializer_list<std::int64_t> shape) {
  const dlpack::Exchange* exchange = source_of(like).exchange;
  if (!exchange || !exchange->allocate) return nb::none();
  dlpack::Tensor prototype{};
  prototype.device = {device.type == DeviceType::kCuda ? dlpack::kCuda : dlpack::kCpu, device.index};
  prototype.rank = static_cast<std::int32_t>(shape.size());
  prototype.dtype = {dlpack::kFloat, 32, 1};
  prototype.shape = const_cast<std::int64_t*>(shape.begin());  // read only
  dlpack::ManagedTensor* memory = nullptr;
  const auto no_error = [](void*, const char*, const char*) {};  // the caller has another way, with errors of its own
  if (exchange->allocate(&prototype, &memory, nullptr, no_error) != 0) return nb::none();
  PyObject* capsule = PyCapsule_New(memory, kHiddenMemory, [](PyObject* self) { release(held_by(self)); });
  if (!capsule) {
    release(memory);
    throw nb::python_error();
  }
  return nb::steal(capsule);
}

Stream current_stream(nb::handle tensor, Device device) {
  if (device.type != DeviceType::kCuda) return nullptr;
  if (const dlpack::Exchange* exchange = source_of(tensor).exchange) {
    void* stream = nullptr;
    if (exchange->current_stream(dlpack::kCuda, device.index, &stream) != 0) throw nb::python_error();
    return stream;
  }
  const nb::object stream = nb::module_::import_("torch.cuda").attr("current_stream")(device.index);
  return reinterpret_cast<Stream>(nb::cast<std::uintptr_t>(stream.attr("cuda_stream")));
}

void bind_tensor(nb::module_& module) {
  using namespace nb::literals;
  // The exchange table is found now, when no mode of PyTorch alters what tensors are.
  source_of(nb::module_::import_("torch").attr("empty")(0, "device"_a = "cpu"));
  // This is for tests of the attribute path on a PyTorch that has the exchange table.
  module.def("_enable_exchange", [](bool enabled) { exchange_enabled = enabled; }, nb::arg("enabled"));
}

}  // namespace flashtile::bindings
