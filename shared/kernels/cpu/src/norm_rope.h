// The operations between a layer's linear projections, for the T tokens of a forward. The residual stream is float32.
#pragma once
#include "attention.h"
#include "quantize.h"
#include "threads.h"
#include "vec.h"

namespace baton {

// residual[t] = scale * table[input_ids[t]]: table [vocabulary][size], residual [T][size].
void embed(Team&, const int64_t* input_ids, int64_t T, const bf16* table, int64_t size, float scale, float* residual);

// out[t] = weight * x[t] / sqrt(mean(x[t]^2) + eps), rounded once (arXiv 1910.07467): x, out [T][size].
void rms_norm(Team&, const float* x, int64_t T, int64_t size, const float* weight, float eps, bf16* out);

// residual[t] += weight * x[t] / sqrt(mean(x[t]^2) + eps): x, residual [T][size].
void add_rms_norm(Team&, const float* x, int64_t T, int64_t size, const float* weight, float eps, float* residual);

// The first as codes, which are made of the float32 result.
void rms_norm(Team&, const float* x, int64_t T, int64_t size, const float* weight, float eps, const Codes& out);

// cos_sin [T][2][half]: cosine, then sine of position * frequency, each times an amplitude, once per forward for all
// layers. waves [2][half] are the frequencies, then the amplitudes.
void rotary_cos_sin(Team&, const int64_t* positions, int64_t T, const float* waves, int64_t half, float* cos_sin);

struct QkNorm {
  const float* weight;  // [num_heads + num_kv_heads][head_dim], or null where the model has none
  float eps;
  bool is_whole = false;  // all heads of q are normed as one row, and all of k
};

// The heads of qkv [T][num_heads + 2 * num_kv_heads][head_dim], normed if the model does, then q and k rotated
// (element i with i + head_dim / 2, arXiv 2104.09864): q goes to q [T][num_heads][head_dim], k and v to
// token t's place kv[pages[t]][..][offsets[t]].
void norm_rope_write(Team&, const bf16* qkv, int64_t T, int64_t num_heads, const QkNorm&, const float* cos_sin,
                     const KVPages& kv, const int64_t* pages, const int64_t* offsets, bf16* q);

}  // namespace baton
