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

inline Words load_chunk(const bf16* row, int64_t chunk, int64_t head_dim) {
  const bf16* from = row + 32 * chunk;
  return 32 * chunk + 32 <= head_dim ? load_words(from) : load_half(from);
}

inline Words interleave_low(Words even, Words odd) { return interleave_low_16(even, odd); }
inline Words interleave_high(Words even, Words odd) { return interleave_high_16(even, odd); }

// Copies a row of a query.
inline void copy_row(bf16* to, const bf16* from, int64_t head_dim) {
  std::memcpy(to, from, size_t(head_dim) * sizeof(bf16));
}
inline void copy_row(float* to, const bf16* from, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += 16)
    store(to + d, widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + d))));
}

// Stores a chunk of the result, times `scale`, in the order of head_dim.
inline void store_chunk(bf16* row, int64_t chunk, int64_t head_dim, Floats low, Floats high, Floats scale) {
  const __m256i a = narrow(low * scale), b = narrow(high * scale);
  const __m256i even = _mm256_unpacklo_epi64(a, b), odd = _mm256_unpackhi_epi64(a, b);
  __m256i* const to = reinterpret_cast<__m256i*>(row + 32 * chunk);
  _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
  if (32 * chunk + 32 <= head_dim) _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
}

// 2^x for x <= 0, relative error below 2e-7 (minimax polynomial of degree 5 on [0, 1), 1 at 0). 0 below -126.
inline Floats exp2_16(Floats x) {
  const Lanes tiny = less(x, floats(-126.0f));
  const Floats f = fraction(x);
  Floats p = floats(1.867130570e-3f);
  p = fmadd(p, f, floats(9.017029253e-3f));
  p = fmadd(p, f, floats(5.579991388e-2f));
  p = fmadd(p, f, floats(2.401644499e-1f));
  p = fmadd(p, f, floats(6.931513118e-1f));
  p = fmadd(p, f, floats(1.0f));
  return where(~tiny, times_power(p, x));
}

inline float exp2_one(float x) { return _mm256_cvtss_f32(lower(exp2_16(floats(x)))); }

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
struct CacheLines {
  explicit CacheLines(int64_t size)
      : data(static_cast<T*>(operator new(std::max<int64_t>(size, 1) * sizeof(T), std::align_val_t(64)))) {}
  ~CacheLines() { operator delete(data, std::align_val_t(64)); }
  CacheLines(const CacheLines&) = delete;
  CacheLines& operator=(const CacheLines&) = delete;

  T* const data;
};

}  // namespace baton
