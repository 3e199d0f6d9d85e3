// Vectors of 16 lanes, for AVX512 or for AVX2 with FMA, and bfloat16 in them. Sums are float32.
//
//   Floats   16 float32, with + - * /
//   Words    16 words of 32 bits, with & | ^: int32, pairs of bf16, or four bytes
//   Doubles  8 float64, with + *
//   Lanes    a choice of lanes, with & ~
//
// __m256i has 16 bf16 and __m128i 16 bytes. A quarter of a vector has 128 bits; the interleaving functions work on each
// quarter by itself. What is written in these gives the same bits by both, except where AVX512 has BF16.
//
//   fraction(x)               x - floor(x), rounded down
//   times_power(x, n)         x * 2^floor(n)
//   load_first, store_first   elements of fewer bits, of lanes that lanes_before() gave
//   store_chosen              the chosen lanes one after the other; room for 16 more is needed
//   vectors_at_once(rows)     how many vectors of sums for each of so many rows fit in registers
#pragma once
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "vec_avx512.h"
#else
#include "vec_avx2.h"
#endif

#include <cstdint>
#include <cstring>

namespace baton {

using bf16 = uint16_t;  // the upper half of a float32

inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// 16 bf16 as float32.
inline Floats widen(__m256i x) { return as_floats(shift_left(from_halves(x), 16)); }

// 16 float32 as bf16, rounded to the nearest, ties to even; NaN stays NaN.
inline __m256i narrow(Floats x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const Words bits = as_words(x), odd = shift_right(bits, 16) & words(1);
  const Floats rounded = as_floats(add(bits, add(odd, words(0x7fff))));
  return to_halves(shift_right(as_words(select(are_numbers(x), rounded, as_floats(words(0x7fc00000)))), 16));
#endif
}

inline void store16(bf16* p, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }

// The same as float32, rounded to bf16.
inline void store16(float* p, Floats x) { store(p, widen(narrow(x))); }

// The elements [first, first + 16) below `end`. The other lanes load 0 and are not stored.
inline Lanes lanes_below(int64_t end, int64_t first) { return lanes_before(end - first); }

inline Floats load_lanes(const bf16* p, Lanes lanes) { return widen(load_first(p, lanes)); }
inline void store_lanes(bf16* p, Lanes lanes, Floats x) { store_first(p, lanes, narrow(x)); }

// The sum of all lanes, halves first.
inline float sum_lanes(Floats x) {
  const __m256 eight = upper(x) + lower(x);
  const __m128 four = _mm256_extractf128_ps(eight, 1) + _mm256_castps256_ps128(eight);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return two[0] + two[1];
}
inline double sum_lanes(Doubles x) {
  const __m256d four = upper(x) + lower(x);
  const __m128d two = _mm256_extractf128_pd(four, 1) + _mm256_castpd256_pd128(four);
  return two[0] + two[1];
}

inline float max_lanes(Floats x) {
  const __m256 eight = _mm256_max_ps(upper(x), lower(x));
  const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// acc[i] += a[2i] * b[2i] + a[2i + 1] * b[2i + 1] for 32 bf16 in a and in b.
inline Floats dot_pairs(Floats acc, Words a, Words b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
  const Words upper = words(int32_t(0xffff0000));
  acc = fmadd(as_floats(shift_left(a, 16)), as_floats(shift_left(b, 16)), acc);
  return fmadd(as_floats(a & upper), as_floats(b & upper), acc);
#endif
}

// What dot() takes from memory: pairs of bf16 where there is an instruction for them, else float32 one by one. Either gives
// the bits of dot_pairs().
#ifdef __AVX512BF16__
using Factor = bf16;
#else
using Factor = float;
#endif
template <class Factor> constexpr int64_t kFactors = 4 / sizeof(Factor);  // in 32 bits

inline Words load_factors(const bf16* p) { return load_words(p); }
inline Floats load_factors(const float* p) { return load_floats(p); }
inline Words repeat_factors(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return words(pair);
}
inline Floats repeat_factors(const float* p) { return floats(*p); }
inline Floats dot(Floats acc, Words a, Words b) { return dot_pairs(acc, a, b); }
inline Floats dot(Floats acc, Floats a, Floats b) { return fmadd(a, b, acc); }

// 16 pairs of bf16 as factors, of which the second ones begin at to + row where they are apart.
inline void store_pairs(bf16* to, int64_t, Words pairs) { store(to, pairs); }
inline void store_pairs(float* to, int64_t row, Words pairs) {
  store(to, as_floats(shift_left(pairs, 16)));
  store(to + row, as_floats(pairs & words(int32_t(0xffff0000))));
}

// dot_pairs() of one pair of factors and 16 pairs of bf16.
inline Floats dot_pairs(Floats acc, const bf16* pair, Words b) { return dot_pairs(acc, repeat_factors(pair), b); }
inline Floats dot_pairs(Floats acc, const float* pair, Words b) {
  acc = fmadd(floats(pair[0]), as_floats(shift_left(b, 16)), acc);
  return fmadd(floats(pair[1]), as_floats(b & words(int32_t(0xffff0000))), acc);
}

// dot_quads<Bits>(acc, w, x): acc[i] += w[4i] * x[4i] + ... + w[4i + 3] * x[4i + 3] for 64 unsigned bytes in w, below
// 256, and below 32 where Bits is 4, and 64 signed ones in x. Exact.

// Of each byte the lower four bits, and the upper four.
inline Words lower_nibbles(Words x) { return x & words(0x0f0f0f0f); }
inline Words upper_nibbles(Words x) { return lower_nibbles(shift_right(x, 4)); }

// exp by 2^n * p(f), relative error below 3e-7 (a minimax polynomial of degree 6 on [-1/2, 1/2]); 0 below -87.3.
inline Floats exp16(Floats x) {
  const Lanes tiny = less(x, floats(-87.33654f));
  const Floats t = x * floats(1.44269504f), n = nearest(t), f = t - n;
  Floats p = floats(1.535336188e-4f);
  p = fmadd(p, f, floats(1.339887440e-3f));
  p = fmadd(p, f, floats(9.618437357e-3f));
  p = fmadd(p, f, floats(5.550332471e-2f));
  p = fmadd(p, f, floats(2.402264791e-1f));
  p = fmadd(p, f, floats(6.931472028e-1f));
  p = fmadd(p, f, floats(1.0f));
  return where(~tiny, times_power(p, n));
}

// Transposes 16 rows of 16 words.
inline void transpose(Words (&rows)[16]) {
  Words t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = interleave_low_32(rows[i], rows[i + 1]);
    t[i + 1] = interleave_high_32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // each quarter of rows[i + c] is four rows of one column
    rows[i] = interleave_low_64(t[i], t[i + 2]);
    rows[i + 1] = interleave_high_64(t[i], t[i + 2]);
    rows[i + 2] = interleave_low_64(t[i + 1], t[i + 3]);
    rows[i + 3] = interleave_high_64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const Words upper_even = even_quarters(rows[c], rows[4 + c]), upper_odd = odd_quarters(rows[c], rows[4 + c]);
    const Words lower_even = even_quarters(rows[8 + c], rows[12 + c]);
    const Words lower_odd = odd_quarters(rows[8 + c], rows[12 + c]);
    rows[c] = even_quarters(upper_even, lower_even);
    rows[4 + c] = even_quarters(upper_odd, lower_odd);
    rows[8 + c] = odd_quarters(upper_even, lower_even);
    rows[12 + c] = odd_quarters(upper_odd, lower_odd);
  }
}

}  // namespace baton
