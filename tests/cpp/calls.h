// This file has a legal call of attention, for tests that break a rule of it, and tells which exception came.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>

#include "flashtile/flashtile.h"
#include "views.h"

namespace flashtile {

alignas(16) inline char memory[64];  // never read: check looks at addresses only

inline TensorView tensor(std::initializer_list<std::int64_t> shape, DType dtype = DType::kFloat16, Device device = {}) {
  return contiguous(memory, dtype, shape, device);
}

inline constexpr Device kGpu{DeviceType::kCuda, 0};

struct Call {
  BackwardTensors tensors;
  Options options;
  ForwardTensors& forward = tensors.forward;
};

/// This call has B = 2, S_q = 90, S_k = 100, H_q = 8, H_k = 4, D = 64, D_v = 32.
inline void with_call(Device device, const std::function<void(Call&)>& body) {
  const DType dtype = DType::kFloat16;
  Call call;
  ForwardTensors& f = call.forward;
  f.q = tensor({2, 90, 8, 64}, dtype, device);
  f.k = tensor({2, 100, 4, 64}, dtype, device);
  f.v = tensor({2, 100, 4, 32}, dtype, device);
  f.alibi_slopes = tensor({8}, DType::kFloat32, device);
  f.out = tensor({2, 90, 8, 32}, dtype, device);
  f.lse = tensor({2, 8, 90}, DType::kFloat32, device);
  call.tensors.dout = f.out;
  call.tensors.dlse = f.lse;
  call.tensors.dq = f.q;
  call.tensors.dk = f.k;
  call.tensors.dv = f.v;
  body(call);
}

template <class Check>
std::string kind_and_message(Check&& check) {
  try {
    check();
  } catch (const InvalidType& error) {
    return std::string("InvalidType: ") + error.what();
  } catch (const InvalidArgument& error) {
    return std::string("InvalidArgument: ") + error.what();
  } catch (const Unreadable& error) {
    return std::string("Unreadable: ") + error.what();
  } catch (const Unsupported& error) {
    return std::string("Unsupported: ") + error.what();
  }
  return "accepted";
}

inline std::string forward(const std::function<void(Call&)>& change, Device device = {}) {
  std::string result;
  with_call(device, [&](Call& call) {
    change(call);
    result = kind_and_message([&] { check_forward("attention", call.forward, call.options); });
  });
  return result;
}

}  // namespace flashtile
