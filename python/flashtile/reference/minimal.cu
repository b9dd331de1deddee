// FlashAttention-1's forward (Algorithm 1 of arXiv:2205.14135) in float32: a thread block a head, a thread a query row.
//
// q (B, S_q, H_q, D), k and v (B, S_k, H_k, D), out as q and full of 0; sums (B, H_q, S_q), full of 0, and tops, as
// sums and full of the lowest float, are each row's l and m. All are contiguous. Launch B·H_q blocks of 32 threads, and
// compile with HEAD_DIM defined, up to 128: q, k and v together fill shared memory's 48 KiB then.

constexpr int D = HEAD_DIM;
constexpr int kRows = 32;     // Br: of Q in a tile, and so the threads
constexpr int kColumns = 32;  // Bc: of K and V

extern "C" __global__ void flash1(const float* q, const float* k, const float* v, float* out, float* sums, float* tops,
                                  float scale, int seqlen_q, int seqlen_k, int heads_q, int heads_k, int causal) {
  __shared__ float sQ[D][kRows];                      // transposed: the threads read 32 neighbours, one from each bank
  __shared__ float sK[kColumns][D], sV[kColumns][D];  // all threads read the same element

  const int t = threadIdx.x, b = blockIdx.x / heads_q, h = blockIdx.x % heads_q, g = h / (heads_q / heads_k);
  const int diagonal = seqlen_k - seqlen_q;  // row i sees column j where j <= i + diagonal, if causal
  // Offsets are 64-bit; from one row to the next it is a step of all heads.
  const long long q_step = (long long)heads_q * D, k_step = (long long)heads_k * D;
  q += q_step * seqlen_q * b + h * D;
  out += q_step * seqlen_q * b + h * D;
  k += k_step * seqlen_k * b + g * D;
  v += k_step * seqlen_k * b + g * D;
  sums += (long long)blockIdx.x * seqlen_q;
  tops += (long long)blockIdx.x * seqlen_q;

  for (int j0 = 0; j0 < seqlen_k; j0 += kColumns) {
    __syncthreads();  // all have done with the last tile of K and V
    for (int j = 0; j < kColumns && j0 + j < seqlen_k; ++j)
      for (int c = t; c < D; c += kRows) {
        sK[j][c] = k[(j0 + j) * k_step + c];
        sV[j][c] = v[(j0 + j) * k_step + c];
      }

    for (int i0 = 0; i0 < seqlen_q; i0 += kRows) {
      if (causal && j0 > i0 + kRows - 1 + diagonal) continue;  // hidden from all rows, so all threads agree
      __syncthreads();                                         // all have done with the last tile of Q
      for (int i = 0; i < kRows && i0 + i < seqlen_q; ++i)
        for (int c = t; c < D; c += kRows) sQ[c][i] = q[(i0 + i) * q_step + c];
      __syncthreads();  // all of Q, K and V is here

      const int row = i0 + t;
      int columns = min(kColumns, seqlen_k - j0);  // that this row sees
      if (causal) columns = min(columns, row + diagonal - j0 + 1);
      if (row >= seqlen_q || columns <= 0) continue;  // waits for the others at the next barrier

      float s[kColumns] = {};  // a row of the scores: in registers, as the loops over it are unrolled
      for (int c = 0; c < D; ++c) {
        const float x = sQ[c][t] * scale;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) s[j] += x * sK[j][c];
      }

      const float old_top = tops[row], old_sum = sums[row];
      float top = old_top;
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
        if (j < columns) top = fmaxf(top, s[j]);
      const float kept = expf(old_top - top) * old_sum;
      float sum = kept;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        s[j] = j < columns ? expf(s[j] - top) : 0.0f;  // from here on P
        sum += s[j];
      }

      for (int c = 0; c < D; ++c) {
        float o = kept * out[row * q_step + c];
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
          if (j < columns) o += s[j] * sV[j][c];
        out[row * q_step + c] = o / sum;
      }
      sums[row] = sum;
      tops[row] = top;
    }
  }
}
