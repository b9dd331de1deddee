// This kernel must spill: it has 200 live values per thread, in a block of 1024 threads that leaves 64 registers to
// each.
__global__ void __launch_bounds__(1024) spill(const float* x, float* y) {
  constexpr int kValues = 200;
  float a[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) a[i] = x[i * 1024 + threadIdx.x];
  for (int round = 0; round < 100; ++round) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) a[i] = a[i] * a[(i + 7) % kValues] + 1;
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) y[i * 1024 + threadIdx.x] = a[i];
}
