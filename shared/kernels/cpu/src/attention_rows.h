// Shared by decode and extend attention: addresses of rows of K and V, pairs of tokens, 2^x, and storing a result.
//
// A row of head_dim bf16 is read in chunks of 32. The last chunk may hold only 16. Products with V run over pairs of
// tokens: interleave() puts dims {0-3, 8-11, 16-19, 24-27} of a chunk into one register and the others into a second
// one. Only store_chunk, which stores the finished result, restores the order.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <new>

#include "attention.h"

namespace baton {

constexpr float kNoScore = -1e30f;  // the maximum of no scores; finite, since inf - inf is NaN

inline int64_t num_chunks(int64_t head_dim) { return (head_dim + 31) / 32; }

// The factor from q . k to an exponent of two.
inline float score_scale(int64_t head_dim) { return 1.44269504f / std::sqrt(float(head_dim)); }

inline __m512i load_chunk(const bf16* row, int64_t chunk, int64_t head_dim) {
  const bf16* from = row + 32 * chunk;
  if (32 * chunk + 32 <= head_dim) return _mm512_loadu_si512(from);
  return _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline __m512i interleave_low(__m512i even, __m512i odd) { return _mm512_unpacklo_epi16(even, odd); }
inline __m512i interleave_high(__m512i even, __m512i odd) { return _mm512_unpackhi_epi16(even, odd); }

// Stores a chunk of the result, times `scale`, in the order of head_dim.
inline void store_chunk(bf16* row, int64_t chunk, int64_t head_dim, __m512 low, __m512 high, __m512 scale) {
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(narrow(_mm512_mul_ps(low, scale))),
                                          narrow(_mm512_mul_ps(high, scale)), 1);
  const __m512i sorted = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), both);
  if (32 * chunk + 32 <= head_dim) _mm512_storeu_si512(row + 32 * chunk, sorted);
  else _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + 32 * chunk), _mm512_castsi512_si256(sorted));
}

// 2^x for x <= 0, relative error below 2e-7 (minimax polynomial of degree 5 on [0, 1), 1 at 0). 0 below -126.
inline __m512 exp2_16(__m512 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // true for NaN
  const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(1.867130570e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.017029253e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.579991388e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.401644499e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931513118e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(normal, p, x);
}

inline float exp2_one(float x) { return _mm512_cvtss_f32(exp2_16(_mm512_set1_ps(x))); }

// Offsets in bytes of the rows of tokens [first, first + count) of a sequence, and of their scales, from the first page
// and for head 0. Head h adds h * head_nbytes().
inline void find_rows(const KVPages& kv, const int32_t* pages, int64_t first, int64_t count, int64_t* rows,
                      int64_t* scales) {
  int64_t page = first / kv.page_size, slot = first % kv.page_size;
  for (int64_t i = 0; i < count; page++, slot = 0) {
    const int64_t begin = pages[page] * kv.page_nbytes();
    for (; i < count && slot < kv.page_size; i++, slot++) {
      rows[i] = begin + slot * kv.row_nbytes();
      scales[i] = begin + kv.rows_nbytes() + slot * int64_t(sizeof(float));
    }
  }
}

// Uninitialized memory in whole cache lines.
template <class T>
struct Scratch {
  explicit Scratch(int64_t size)
      : data(static_cast<T*>(operator new(std::max<int64_t>(size, 1) * sizeof(T), std::align_val_t(64)))) {}
  ~Scratch() { operator delete(data, std::align_val_t(64)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* const data;
};

}  // namespace baton
