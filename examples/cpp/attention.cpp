// This program computes causal attention over grouped heads without Python, and compares it with the definition. Memory
// and workspace are the caller's: the library allocates nothing.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <random>
#include <vector>

#include "flashtile/flashtile.h"

namespace {

constexpr int kRows = 70, kHeadsQ = 4, kHeadsK = 2, kHeadDim = 64;

/// Returns a view of one batch entry, (1, S, H, D).
flashtile::TensorView view(std::vector<float>& data, int heads) {
  return {.data = data.data(),
          .dtype = flashtile::DType::kFloat32,
          .rank = 4,
          .shape = {1, kRows, heads, kHeadDim},
          .strides = {kRows * heads * kHeadDim, heads * kHeadDim, kHeadDim, 1}};
}

std::vector<float> random(int heads) {
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> data(kRows * heads * kHeadDim);
  for (float& x : data) x = normal(generator);
  return data;
}

/// Returns the largest difference between `out` and softmax(QKᵀ/√D)·V, of which row i sees the keys up to i.
double error(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v,
             const std::vector<float>& out) {
  const auto at = [](int row, int head, int heads) { return (row * heads + head) * kHeadDim; };
  double most = 0;
  for (int head = 0; head < kHeadsQ; ++head) {
    const int of_group = head / (kHeadsQ / kHeadsK);
    for (int row = 0; row < kRows; ++row) {
      std::vector<double> sums(kHeadDim);
      double total = 0;
      for (int key = 0; key <= row; ++key) {
        double score = 0;
        for (int d = 0; d < kHeadDim; ++d)
          score += double(q[at(row, head, kHeadsQ) + d]) * k[at(key, of_group, kHeadsK) + d];
        const double weight = std::exp(score / std::sqrt(double(kHeadDim)));
        total += weight;
        for (int d = 0; d < kHeadDim; ++d) sums[d] += weight * v[at(key, of_group, kHeadsK) + d];
      }
      for (int d = 0; d < kHeadDim; ++d)
        most = std::fmax(most, std::fabs(sums[d] / total - out[at(row, head, kHeadsQ) + d]));
    }
  }
  return most;
}

}  // namespace

int main() try {
  std::vector<float> q = random(kHeadsQ), k = random(kHeadsK), v = random(kHeadsK), out(q.size());
  const flashtile::ForwardTensors tensors{
      .q = view(q, kHeadsQ), .k = view(k, kHeadsK), .v = view(v, kHeadsK), .out = view(out, kHeadsQ)};
  const flashtile::DeviceInfo& device = flashtile::device_info(tensors.q.device);
  const flashtile::ForwardPlan plan = flashtile::plan_forward("attention", tensors, {.causal = true}, device);
  std::puts(to_string(plan).c_str());

  std::vector<char> memory(static_cast<std::size_t>(plan.workspace_bytes) + 64);
  void* workspace = memory.data();
  std::size_t space = memory.size();
  std::align(64, static_cast<std::size_t>(plan.workspace_bytes), workspace, space);
  flashtile::run_forward(plan, tensors, workspace, nullptr);

  const double found = error(q, k, v, out);
  std::printf("largest difference from float64: %.2g\n", found);
  return found < 1e-5 ? EXIT_SUCCESS : EXIT_FAILURE;
} catch (const std::exception& refusal) {  // it names the argument, what was found, and what is expected
  std::fprintf(stderr, "%s\n", refusal.what());
  return EXIT_FAILURE;
}
