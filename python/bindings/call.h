// This file holds what every call needs beside its tensors: the device as select knows it, results, and a workspace.
#pragma once

#include <cstdlib>
#include <memory>
#include <string>

#include "bindings.h"
#include "flashtile/plan.h"

namespace flashtile::bindings {

/// These names and values live as long as the process.
struct Interned {
  nb::handle new_empty = nb::str("new_empty").release();
  nb::handle new_full = nb::str("new_full").release();
  nb::handle save_for_backward = nb::str("save_for_backward").release();
  nb::handle unsaved = nb::str("unsaved").release();
  nb::handle empty_like = nb::object(nb::module_::import_("torch").attr("empty_like")).release();
  nb::handle float32 = nb::object(nb::module_::import_("torch").attr("float32")).release();
  nb::handle int32 = nb::object(nb::module_::import_("torch").attr("int32")).release();
  nb::handle get_num_threads = nb::object(nb::module_::import_("torch").attr("get_num_threads")).release();
};

const Interned& interned();

/// Throws InvalidType unless `tuple` has `count` elements, which the message calls `what`.
void check_count(const char* function, nb::handle tuple, std::size_t count, const char* what);

/// Returns the device as the core knows it, and needs no Python. Throws Unsupported in the name of `function`.
DeviceInfo known_device(const char* function, Device device);

/// Returns the same with as many CPU threads as PyTorch may use, or the device that a call is only planned for.
DeviceInfo device_for(const char* function, Device device);

/// Returns whether this thread is inside explain(), which asks how calls would be computed. Then a call ends when its
/// plan is made, before anything is allocated or written, by throwing the text that describes it.
bool explaining();
struct Explained {
  std::string text;
};

/// Returns the device that such a call is planned for. It is null if that is the device of its tensors, and in every
/// other call.
const DeviceInfo* planned_device();

/// Returns an address that stands for the memory of a tensor without memory, in a call that is only planned.
void* planned_memory();

/// Limits the compute capability of the GPUs that device_for returns from now on.
void limit_compute_capability(int limit);

/// Returns a view of the tensor that a caller gives for out, or of none for None, and in a call that is only planned
/// for a device. It is written where it lies, so what a copy would have to stand for is refused.
TensorView given_out(const char* function, nb::handle out);

/// Checks that a result can be copied to `out`, a tensor, whose shape and dtype have been checked. It may have no
/// element in the tensors that are `read`, by name.
void check_place(const char* function, nb::handle out, const nb::dict& read);

/// These return contiguous tensors for results. `view` is the view of q.
nb::object new_out(nb::handle q, const TensorView& view, const Problem& problem);
nb::object new_lse(nb::handle q, const Problem& problem);

struct FreeHostMemory {
  void operator()(void* memory) const { std::free(memory); }
};
using HostMemory = std::unique_ptr<void, FreeHostMemory>;

/// Returns memory for a workspace on a CPU.
HostMemory host_memory(std::int64_t bytes);

/// This is a plan's workspace: host memory, or on a GPU memory of the framework, which may reuse it for later work on
/// the current stream.
class Workspace {
 public:
  Workspace(const char* function, const Plan& plan, nb::handle like);
  void* get() const { return host_ ? host_.get() : pointer_; }

 private:
  HostMemory host_;
  nb::object device_;
  void* pointer_ = nullptr;
};

}  // namespace flashtile::bindings
