// Extend attention of a strip of rows to a block of kKeys keys: scores, softmax, and the weighted sum of values.
#pragma once
#include "amx.h"
#include "attention_rows.h"

namespace baton::extend {

constexpr int64_t kKeys = 64;
constexpr int64_t kTallest = 32;  // most rows of any kind of strip

// Products of a strip of 6 rows. They are functions of their own, so that they have all registers.
struct VectorStrip {
  static constexpr int64_t kHeight = 6;

  static int32_t pair(const bf16* from) {
    int32_t value;
    std::memcpy(&value, from, 4);
    return value;
  }

  // products [row][key] = q k^T
  [[gnu::noinline]] static void multiply_keys(const bf16* q, const bf16* k, int64_t dim, float* products) {
    __m512 sums[kHeight][4];
#pragma GCC unroll 8
    for (int r = 0; r < kHeight; r++)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) sums[r][i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim / 2; d++) {
      __m512i keys[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) keys[i] = _mm512_load_si512(k + (d * kKeys + 16 * i) * 2);
#pragma GCC unroll 8
      for (int r = 0; r < kHeight; r++) {
        const __m512i query = _mm512_set1_epi32(pair(q + r * dim + 2 * d));
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sums[r][i] = dot_pairs(sums[r][i], query, keys[i]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kHeight; r++)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) _mm512_store_ps(products + r * kKeys + 16 * i, sums[r][i]);
  }

  // sums [row][dim] += weights v, over the first num_keys keys
  static void add_values(const bf16* weights, const bf16* v, int64_t num_keys, int64_t dim, float* sums) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) add_values_of<4>(weights, v, num_keys, dim, d, sums);
    if (d < dim) add_values_of<2>(weights, v, num_keys, dim, d, sums);
  }

  template <int N>
  [[gnu::noinline]] static void add_values_of(const bf16* weights, const bf16* v, int64_t num_keys, int64_t dim,
                                              int64_t first, float* sums) {
    __m512 x[kHeight][N];
#pragma GCC unroll 8
    for (int r = 0; r < kHeight; r++)
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) x[r][i] = _mm512_load_ps(sums + r * dim + first + 16 * i);
    for (int64_t key = 0; key < num_keys; key += 2) {
      __m512i values[N];
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) values[i] = _mm512_load_si512(v + key * dim + (first + 16 * i) * 2);
#pragma GCC unroll 8
      for (int r = 0; r < kHeight; r++) {
        const __m512i weight = _mm512_set1_epi32(pair(weights + r * kKeys + key));
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) x[r][i] = dot_pairs(x[r][i], weight, values[i]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kHeight; r++)
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) _mm512_store_ps(sums + r * dim + first + 16 * i, x[r][i]);
  }
};

#ifdef BATON_HAS_AMX
// The same products with AMX: two by two tiles of 16 rows and 16 columns.
struct TileStrip {
  static constexpr int64_t kHeight = 32;

  static void multiply_keys(const bf16* q, const bf16* k, int64_t dim, float* products) {
    for (int64_t key = 0; key < kKeys; key += 32) {
      amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
      for (int64_t d = 0; d < dim; d += 32) {
        const bf16* keys = k + (d / 2 * kKeys + key) * 2;
        multiply(q + d, dim, keys, kKeys);
      }
      store_sums(products + key, kKeys);
    }
  }

  static void add_values(const bf16* weights, const bf16* v, int64_t num_keys, int64_t dim, float* sums) {
    for (int64_t d = 0; d < dim; d += 32) {
      float* x = sums + d;
      amx::load<0>(x, 4 * dim), amx::load<1>(x + 16, 4 * dim);
      amx::load<2>(x + 16 * dim, 4 * dim), amx::load<3>(x + 16 * dim + 16, 4 * dim);
      for (int64_t key = 0; key < num_keys; key += 32) multiply(weights + key, kKeys, v + key * dim + 2 * d, dim);
      store_sums(x, dim);
    }
  }

 private:
  // Tiles 0 to 3 += a [32][32] (rows of a_stride) times b [16][32][2] (rows of b_stride pairs).
  static void multiply(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride) {
    amx::load<4>(a, 2 * a_stride), amx::load<5>(a + 16 * a_stride, 2 * a_stride);
    amx::load<6>(b, 4 * b_stride), amx::load<7>(b + 32, 4 * b_stride);
    amx::dot<0, 4, 6>(), amx::dot<1, 4, 7>(), amx::dot<2, 5, 6>(), amx::dot<3, 5, 7>();
  }

  static void store_sums(float* to, int64_t stride) {
    amx::store<0>(to, 4 * stride), amx::store<1>(to + 16, 4 * stride);
    amx::store<2>(to + 16 * stride, 4 * stride), amx::store<3>(to + 16 * stride + 16, 4 * stride);
  }
};
#endif

// 2^x, relative error below 7.5e-5 (minimax polynomial of degree 3 on [0, 1)), a fiftieth of what bf16 rounds off.
inline __m512 rough_exp2_16(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(7.802452264e-2f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.260671554e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.958335405e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.999252186e-1f));
  return _mm512_scalef_ps(p, x);
}

// The sums of a row so far. Weights are 2^(score - reference).
struct Row {
  float* total;      // [16], sums of weights by lane
  float* sums;       // [dim], sums of weights times values
  float& reference;  // at most kHeadroom below the highest score
};

// Weights may grow to 2^kHeadroom before the reference is raised, so it is hardly ever raised after the first keys.
// The relative rounding error of bf16 does not depend on the size of a weight, and the sums of all weights fit in
// float32.
constexpr float kHeadroom = 8;

inline void raise_reference(float reference, int64_t dim, Row row) {
  const __m512 shrink = _mm512_set1_ps(exp2_one(row.reference - reference));
  row.reference = reference;
  _mm512_store_ps(row.total, _mm512_mul_ps(_mm512_load_ps(row.total), shrink));
  for (int64_t d = 0; d < dim; d += 16)
    _mm512_store_ps(row.sums + d, _mm512_mul_ps(_mm512_load_ps(row.sums + d), shrink));
}

// Turns the products of a row into weights. If kMasked, the weights of keys from `visible` on are 0.
template <bool kMasked>
[[gnu::always_inline]] inline void softmax_row(const float* products, int64_t visible, __m512 scale, int64_t dim,
                                               Row row, bf16* weights) {
  static_assert(kKeys == 64);
  __m512 x[4], w[4];
  for (int i = 0; i < 4; i++) {
    x[i] = _mm512_load_ps(products + 16 * i);
    if (kMasked) x[i] = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), lanes_before(visible - 16 * i), x[i]);
  }
  const __m512 highest = _mm512_mul_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])), scale);
  if (_mm512_cmp_ps_mask(highest, _mm512_set1_ps(row.reference + kHeadroom), _CMP_GT_OQ))
    raise_reference(_mm512_reduce_max_ps(highest), dim, row);
  const __m512 reference = _mm512_set1_ps(row.reference);
  for (int i = 0; i < 4; i++) {
    w[i] = rough_exp2_16(_mm512_fmsub_ps(x[i], scale, reference));
    store16(weights + 16 * i, w[i]);
  }
  const __m512 sum = _mm512_add_ps(_mm512_add_ps(w[0], w[1]), _mm512_add_ps(w[2], w[3]));
  _mm512_store_ps(row.total, _mm512_add_ps(_mm512_load_ps(row.total), sum));
}

}  // namespace baton::extend
