// bfloat16 in AVX512 registers: load, store, dot products of pairs, exp. Sums are float32.
#pragma once
#include <immintrin.h>

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
inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

inline __m512 load16(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

// 16 float32 as bf16, rounded to the nearest, ties to even; NaN stays NaN.
inline __m256i narrow(__m512 x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

inline void store16(bf16* p, __m512 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }

// The first `count` lanes of a register.
inline __mmask16 lanes_before(int64_t count) {
  return count >= 16 ? __mmask16(0xffff) : count <= 0 ? __mmask16(0) : __mmask16((1u << count) - 1);
}

// A mask of the elements [first, first + 16) below `end`. The other lanes load 0 and are not stored.
inline __mmask16 lanes_below(int64_t end, int64_t first) { return lanes_before(end - first); }

inline __m512 load_lanes(const float* p, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, p); }
inline __m512 load_lanes(const bf16* p, __mmask16 lanes) { return widen(_mm256_maskz_loadu_epi16(lanes, p)); }
inline void store_lanes(float* p, __mmask16 lanes, __m512 x) { _mm512_mask_storeu_ps(p, lanes, x); }
inline void store_lanes(bf16* p, __mmask16 lanes, __m512 x) { _mm256_mask_storeu_epi16(p, lanes, narrow(x)); }

inline bf16 to_bf16(float x) { return bf16(_mm_extract_epi16(_mm256_castsi256_si128(narrow(_mm512_set1_ps(x))), 0)); }

// acc[i] += a[2i] * b[2i] + a[2i + 1] * b[2i + 1] for 32 bf16 in a and in b.
inline __m512 dot_pairs(__m512 acc, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000u));
  acc = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), acc);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, upper)), _mm512_castsi512_ps(_mm512_and_si512(b, upper)), acc);
#endif
}

// acc[i] += w[4i] * x[4i] + ... + w[4i + 3] * x[4i + 3] for 64 unsigned bytes in w and 64 signed ones in x. Exact.
//
// GCC 12 copies and spills the accumulators of loops over _mm512_dpbusd_epi32, which halves their speed.
inline __m512i dot_quads(__m512i acc, __m512i w, __m512i x) {
#ifdef __AVX512VNNI__
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
  return acc;
#else
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w, _mm512_set1_epi16(0xff)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(x, 8));
  return _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
#endif
}

// exp by 2^n * p(f), relative error below 3e-7 (a minimax polynomial of degree 6 on [-1/2, 1/2]); 0 below -87.3.
inline __m512 exp16(__m512 x) {
  const __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.33654f), _CMP_LT_OQ);
  const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(t, n);
  __m512 p = _mm512_set1_ps(1.535336188e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.339887440e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.618437357e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.550332471e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402264791e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931472028e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(_knot_mask16(tiny), p, n);
}

// Transposes 16 rows of 16 values of 32 bits.
inline void transpose(__m512i (&rows)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // each 128 bits of rows[i + c] are four rows of one column
    rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    constexpr int even = 0x88, odd = 0xdd;  // of the quarters of both
    const __m512i upper_even = _mm512_shuffle_i32x4(rows[c], rows[4 + c], even);
    const __m512i upper_odd = _mm512_shuffle_i32x4(rows[c], rows[4 + c], odd);
    const __m512i lower_even = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], even);
    const __m512i lower_odd = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], odd);
    rows[c] = _mm512_shuffle_i32x4(upper_even, lower_even, even);
    rows[4 + c] = _mm512_shuffle_i32x4(upper_odd, lower_odd, even);
    rows[8 + c] = _mm512_shuffle_i32x4(upper_even, lower_even, odd);
    rows[12 + c] = _mm512_shuffle_i32x4(upper_odd, lower_odd, odd);
  }
}

}  // namespace baton
