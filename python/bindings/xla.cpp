// This file lets XLA call attention, for JAX. XLA calls a handler on threads that have no Python, with buffers that it
// has allocated, of results too, and with options as attributes; flashtile/jax.py makes such calls.
#include <algorithm>
#include <cfenv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "bindings.h"
#include "call.h"
#include "flashtile/flashtile.h"
#include "xla_ffi.h"

namespace flashtile::bindings {
namespace {

/// This is an error that XLA made. The handler returns it.
struct XlaError {
  xla::Error* error;
};

template <class Request>
Request asked(xla::Error* (*function)(Request*), Request request) {
  request.header = {sizeof(Request), nullptr};
  if (xla::Error* const error = function(&request)) throw XlaError{error};
  return request;
}

DType dtype_of(xla::Type type) {
  switch (type) {
    case xla::kFloat32: return DType::kFloat32;
    case xla::kFloat16: return DType::kFloat16;
    case xla::kBfloat16: return DType::kBFloat16;
    default: return DType::kOther;
  }
}

// An attribute of one of these types holds an option.
constexpr xla::Type type_of(bool) {
  return xla::kBool;
}
constexpr xla::Type type_of(std::int64_t) {
  return xla::kInt64;
}
constexpr xla::Type type_of(double) {
  return xla::kFloat64;
}

/// A Call reads what a handler was given, by name. An attribute holds an option, which is absent where it has its
/// default, or the index of the buffer of that name, results being counted after arguments.
class Call {
 public:
  Call(const char* function, const xla::CallFrame& frame, DeviceType type) : function_(function), frame_(frame) {
    if (frame.header.bytes < sizeof(frame) || frame.api->header.bytes < sizeof(*frame.api))
      refuse("jaxlib is too old, expected 0.6 or newer");
    if (type == DeviceType::kCpu) return;
    device_ = {type, asked(frame.api->device, {.header = {}, .context = frame.context, .index = 0}).index};
    stream_ = asked(frame.api->stream, {.header = {}, .context = frame.context, .stream = nullptr}).stream;
  }

  const xla::CallFrame& frame() const { return frame_; }
  DeviceInfo device() const { return known_device(function_, device_); }
  Stream stream() const { return stream_; }

  /// Returns no tensor where there is no buffer of that name.
  TensorView view(std::string_view name) const {
    TensorView view;
    const xla::Buffer* const buffer = find(name);
    if (!buffer) return view;
    if (buffer->rank > kMaxRank) refuse(std::string(name) + " has too many dimensions");
    view = {.data = buffer->data, .dtype = dtype_of(buffer->type), .device = device_};
    view.rank = static_cast<int>(buffer->rank);
    std::copy_n(buffer->shape, view.rank, view.shape.begin());
    std::int64_t stride = 1;
    for (int i = view.rank - 1; i >= 0; stride *= view.shape[i--]) view.strides[i] = stride;
    return view;
  }

  Options options() const {
    Options options;
    options.each(*this);
    if (const xla::Buffer* const seed = find("seed_array")) options.seed = read(*seed);
    return options;
  }

  ForwardTensors inputs() const {
    ForwardTensors tensors;
    tensors.q = view("q");
    tensors.k = view("k");
    tensors.v = view("v");
    tensors.alibi_slopes = view("alibi_slopes");
    tensors.sinks = view("sinks");
    tensors.out = view("out");
    tensors.lse = view("lse");
    tensors.state = view("state");
    return tensors;
  }

  // Options::each calls these.
  template <class T>
  void operator()(const char* name, T& value) const {
    if (const auto given = number<T>(name)) value = *given;
  }
  template <class T>
  void operator()(const char* name, std::optional<T>& value) const {
    value = number<T>(name);
  }
  void operator()(const char* name, std::uint64_t& value) const {
    if (const auto given = number<std::int64_t>(name)) value = static_cast<std::uint64_t>(*given);
  }
  void operator()(const std::string& name, std::optional<std::int64_t>& left,
                  std::optional<std::int64_t>& right) const {
    left = number<std::int64_t>(name + "_left");
    right = number<std::int64_t>(name + "_right");
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const { throw Unsupported(std::string(function_) + ": " + why); }

  template <class T>
  std::optional<T> number(std::string_view name) const {
    const xla::Attributes& all = frame_.attributes;
    for (std::int64_t i = 0; i < all.count; ++i) {
      if (std::string_view(all.names[i]->data, all.names[i]->size) != name) continue;
      const auto* const scalar = static_cast<const xla::Scalar*>(all.items[i]);
      if (all.kinds[i] != xla::kScalarAttribute || scalar->type != type_of(T()))
        refuse("attribute " + std::string(name) + " has another type");
      return *static_cast<const T*>(scalar->value);
    }
    return std::nullopt;
  }

  const xla::Buffer* find(std::string_view name) const {
    const auto index = number<std::int64_t>(name);
    if (!index) return nullptr;
    const bool is_result = *index >= frame_.arguments.count;
    const xla::Buffers& buffers = is_result ? frame_.results : frame_.arguments;
    const std::int64_t place = is_result ? *index - frame_.arguments.count : *index;
    if (place < 0 || place >= buffers.count) refuse("there is no buffer for " + std::string(name));
    const auto* const buffer = static_cast<const xla::Buffer*>(buffers.items[place]);
    if (buffer->header.bytes < sizeof(*buffer)) refuse("XLA's buffers are other than expected");
    return buffer;
  }

  std::uint64_t read(const xla::Buffer& seed) const {
    if (device_.type != DeviceType::kCpu)
      refuse("seed is an array on " + name_of(device_) + ", expected an int, which the host can read without waiting");
    if (seed.type != xla::kUint32 || seed.rank != 0) refuse("seed is no uint32 array of shape ()");
    return *static_cast<const std::uint32_t*>(seed.data);
  }

  const char* function_;
  const xla::CallFrame& frame_;
  Device device_;
  Stream stream_ = nullptr;
};

/// This is a plan's workspace: host memory, or on a GPU memory of XLA, which may reuse it for later work on the stream.
class Scratch {
 public:
  Scratch(const Call& call, const Plan& plan) : frame_(call.frame()) {
    if (plan.workspace_bytes == 0) return;
    if (plan.problem.device.type == DeviceType::kCpu) {
      host_ = host_memory(plan.workspace_bytes);
      return;
    }
    constexpr std::size_t kGranted = 16, kNeeded = 64;  // alignments: what XLA lets one ask for, and what a plan needs
    bytes_ = plan.workspace_bytes + kNeeded - kGranted;
    const xla::Allocation request{
        .header = {}, .context = frame_.context, .size = bytes_, .alignment = kGranted, .data = nullptr};
    device_ = asked(frame_.api->allocate, request).data;
    aligned_ = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(device_) + kNeeded - 1) / kNeeded * kNeeded);
  }

  ~Scratch() {
    if (!device_) return;
    xla::Deallocation request{
        .header = {sizeof(request), nullptr}, .context = frame_.context, .size = bytes_, .data = device_};
    xla::Error* const error = frame_.api->deallocate(&request);
    if (!error) return;
    xla::DestroyedError ignored{.header = {sizeof(ignored), nullptr}, .error = error};
    frame_.api->destroy_error(&ignored);
  }

  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* get() const { return host_ ? host_.get() : aligned_; }

 private:
  const xla::CallFrame& frame_;
  HostMemory host_;
  void* device_ = nullptr;
  void* aligned_ = nullptr;
  std::size_t bytes_ = 0;
};

struct Forward {
  static constexpr const char* kFunction = "attention";

  static void run(const Call& call) {
    const ForwardTensors tensors = call.inputs();
    const ForwardPlan plan = plan_forward(kFunction, tensors, call.options(), call.device());
    const Scratch workspace(call, plan);
    run_forward(plan, tensors, workspace.get(), call.stream());
  }
};

struct Backward {
  static constexpr const char* kFunction = "attention backward";

  static void run(const Call& call) {
    const BackwardTensors tensors{.forward = call.inputs(),
                                  .dout = call.view("dout"),
                                  .dlse = call.view("dlse"),
                                  .dq = call.view("dq"),
                                  .dk = call.view("dk"),
                                  .dv = call.view("dv"),
                                  .dsinks = call.view("dsinks")};
    const BackwardPlan plan = plan_backward(kFunction, tensors, call.options(), call.device());
    const Scratch workspace(call, plan);
    run_backward(plan, tensors, workspace.get(), call.stream());
  }
};

xla::Error* error_of(const xla::CallFrame& frame, xla::ErrorCode code, const char* message) {
  xla::ErrorOfMessage request{.header = {sizeof(request), nullptr}, .message = message, .code = code};
  return frame.api->create_error(&request);
}

/// Answers XLA's question for the version that a handler was made for, by theirs if that is among those of xla_ffi.h.
/// Early ones do not tell theirs. XLA refuses a handler whose answer it does not know.
void tell_version(const xla::CallFrame& frame) {
  xla::Version& answer = reinterpret_cast<xla::MetadataExtension*>(frame.header.extensions)->metadata->version;
  answer.major = xla::kMajorVersion;
  answer.minor = frame.api ? std::min(frame.api->version.minor, xla::kNewestMinor) : xla::kOldestMinor;
}

/// XLA's threads take subnormal numbers for zeros, those that help on a CPU do not. While a call lasts all do as the
/// latter, as in PyTorch: else bits would depend on which thread computes them.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    std::fegetenv(&theirs_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&theirs_); }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

 private:
  std::fenv_t theirs_;
};

template <class Direction, DeviceType kType>
xla::Error* handle(xla::CallFrame* given) {
  const xla::CallFrame& frame = *given;
  if (frame.header.extensions && frame.header.extensions->kind == xla::kMetadata) {
    tell_version(frame);
    return nullptr;
  }
  const DefaultArithmetic arithmetic;
  try {
    Direction::run(Call(Direction::kFunction, frame, kType));
    return nullptr;
  } catch (const XlaError& failure) {
    return failure.error;
  } catch (const Unsupported& error) {
    return error_of(frame, xla::ErrorCode::kUnimplemented, error.what());
  } catch (const std::invalid_argument& error) {
    return error_of(frame, xla::ErrorCode::kInvalidArgument, error.what());
  } catch (const std::exception& error) {
    return error_of(frame, xla::ErrorCode::kInternal, error.what());
  }
}

template <class Direction>
nb::dict handlers() {
  const auto capsule = [](xla::Handler handler) { return nb::capsule(reinterpret_cast<void*>(handler)); };
  nb::dict platforms;
  platforms["cpu"] = capsule(handle<Direction, DeviceType::kCpu>);
  platforms["CUDA"] = capsule(handle<Direction, DeviceType::kCuda>);
  return platforms;
}

}  // namespace

void bind_xla(nb::module_& module) {
  nb::dict targets;
  targets["flashtile_forward"] = handlers<Forward>();
  targets["flashtile_backward"] = handlers<Backward>();
  module.attr("XLA_HANDLERS") = targets;
}

}  // namespace flashtile::bindings
