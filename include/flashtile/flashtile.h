// This file is the public host API. A call is plan (check, then select: pure host code) and then run (launch).
//
//   ForwardPlan plan = plan_forward("attention", tensors, options, device_info(tensors.q.device));
//   run_forward(plan, tensors, workspace, stream);
#pragma once

#include "flashtile/error.h"
#include "flashtile/kvcache.h"
#include "flashtile/plan.h"
#include "flashtile/problem.h"
#include "flashtile/registry.h"

namespace flashtile {

/// Checks arguments in the name of `function` (for messages) and returns the problem they pose. `out` and `lse` are
/// checked where given. Throws InvalidArgument, InvalidType or Unsupported.
Problem check_forward(const char* function, const ForwardTensors& tensors, const Options& options);
Problem check_backward(const char* function, const BackwardTensors& tensors, const Options& options);

/// Checks that `out` can be written where it lies, and that it shares no memory with what is `read`, called `name` in
/// messages, as plans do: for results that are copied there, which no plan knows of.
void check_place(const char* function, const TensorView& out, const char* name, const TensorView& read);

/// Chooses the kernel. Throws Unsupported where no row of the variant table serves the problem on the device. The
/// gradients of a batch-invariant backward have the same bits in every run, and those of a sequence, of q, k and v, do
/// not depend on the others in its batch. A batch-invariant forward has a plan of its own where there is such a kernel;
/// elsewhere it is a call over a cache.
ForwardPlan select_forward(const Problem& problem, const DeviceInfo& device, bool batch_invariant = false);
bool has_invariant_kernel(const Problem& problem, const DeviceInfo& device);
BackwardPlan select_backward(const Problem& problem, const DeviceInfo& device, bool batch_invariant = false);

/// Checks, then selects.
ForwardPlan plan_forward(const char* function, const ForwardTensors& tensors, const Options& options,
                         const DeviceInfo& device, bool batch_invariant = false);
BackwardPlan plan_backward(const char* function, const BackwardTensors& tensors, const Options& options,
                           const DeviceInfo& device, bool batch_invariant = false);

/// A batch-invariant forward gives a row the bits that a batch-invariant call over a cache gives it. On a CPU every
/// forward does, and on a GPU one that has_invariant_kernel. Elsewhere it is such a call, of the tensors that as_cache
/// returns: the cache is k and v as they lie, and is read whole. `keys_end`, (B), int32, contiguous, is where the keys
/// of each sequence end: S_k, or in a ragged batch a row of k. check_invariant refuses legal forwards that have no such
/// bits, and, where the call is `over_cache`, those that no such call can be.
void check_invariant(const char* function, const ForwardTensors& tensors, const Options& options,
                     const Problem& problem, bool over_cache);
KvcacheTensors as_cache(const ForwardTensors& tensors, const TensorView& keys_end);

/// Launches on `stream`. `workspace` points to plan.workspace_bytes bytes on the problem's device.
void run_forward(const ForwardPlan& plan, const ForwardTensors& tensors, void* workspace, Stream stream);
void run_backward(const BackwardPlan& plan, const BackwardTensors& tensors, void* workspace, Stream stream);

/// Returns facts about a device, which are read once and cached. For a CUDA device it throws Unsupported in a build
/// without CUDA.
const DeviceInfo& device_info(Device device);

/// Returns a GPU that need not be in this machine, by its name ("H100") or compute capability ("9.0"): it is enough for
/// a plan. Throws InvalidArgument, which lists the names.
DeviceInfo described_gpu(const std::string& name);

/// These say whether this build holds CUDA kernels, and for what: "sm_80, sm_90, compute_80" or "".
bool built_with_cuda();
const char* cuda_architectures();

/// Messages give this advice to users of a build without CUDA kernels.
inline constexpr const char* kCudaRemedy =
    "build it with nvcc on PATH, or with an nvcc from PyPI: `make build CUDA=PYPI` or "
    "`pip install . -C cmake.define.FLASHTILE_CUDA=PYPI`";

}  // namespace flashtile
