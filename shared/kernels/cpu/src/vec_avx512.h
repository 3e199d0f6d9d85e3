// The vectors of vec.h as registers of 512 bits.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace baton {

using Floats = __m512;
using Words = __m512i;
using Doubles = __m512d;
using Lanes = __mmask16;

constexpr int vectors_at_once(int) { return 4; }  // six rows: 24 sums, 4 vectors, 1 of x

inline Floats floats(float x) { return _mm512_set1_ps(x); }
inline Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline __m256 lower(Floats x) { return _mm512_castps512_ps256(x); }
inline __m256 upper(Floats x) { return _mm512_extractf32x8_ps(x, 1); }
inline Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fmsub(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats nearest(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats fraction(Floats x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline Floats times_power(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }

inline Doubles doubles(double x) { return _mm512_set1_pd(x); }
inline Doubles lower_doubles(Floats x) { return _mm512_cvtps_pd(lower(x)); }
inline Doubles upper_doubles(Floats x) { return _mm512_cvtps_pd(upper(x)); }
inline __m256d lower(Doubles x) { return _mm512_castpd512_pd256(x); }
inline __m256d upper(Doubles x) { return _mm512_extractf64x4_pd(x, 1); }
inline Doubles fnmadd(Doubles a, Doubles b, Doubles c) { return _mm512_fnmadd_pd(a, b, c); }
inline Doubles nearest(Doubles x) { return _mm512_roundscale_pd(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats to_floats(Doubles lower, Doubles upper) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(lower)), _mm512_cvtpd_ps(upper), 1);
}
inline Words to_ints(Doubles lower, Doubles upper) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtpd_epi32(lower)), _mm512_cvtpd_epi32(upper), 1);
}

inline Words words(int32_t x) { return _mm512_set1_epi32(x); }
inline Words load_words(const void* p) { return _mm512_loadu_si512(p); }
inline Words load_half(const void* p) {
  return _mm512_zextsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
inline Words load_quarters(const void* a, const void* b, const void* c, const void* d) {
  const auto load = [](const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); };
  const Words two = _mm512_mask_broadcast_i32x4(_mm512_zextsi128_si512(load(a)), 0x00f0, load(b));
  return _mm512_mask_broadcast_i32x4(_mm512_mask_broadcast_i32x4(two, 0x0f00, load(c)), 0xf000, load(d));
}
inline void store(void* p, Words x) { _mm512_storeu_si512(p, x); }
inline Words add(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words subtract(Words a, Words b) { return _mm512_sub_epi32(a, b); }
inline Words multiply(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
inline Words max(Words a, Words b) { return _mm512_max_epi32(a, b); }
inline Words shift_left(Words x, int n) { return _mm512_slli_epi32(x, n); }
inline Words shift_right(Words x, int n) { return _mm512_srli_epi32(x, n); }
inline Words interleave_low_16(Words a, Words b) { return _mm512_unpacklo_epi16(a, b); }
inline Words interleave_high_16(Words a, Words b) { return _mm512_unpackhi_epi16(a, b); }
inline Words interleave_low_32(Words a, Words b) { return _mm512_unpacklo_epi32(a, b); }
inline Words interleave_high_32(Words a, Words b) { return _mm512_unpackhi_epi32(a, b); }
inline Words interleave_low_64(Words a, Words b) { return _mm512_unpacklo_epi64(a, b); }
inline Words interleave_high_64(Words a, Words b) { return _mm512_unpackhi_epi64(a, b); }
inline Words even_quarters(Words a, Words b) { return _mm512_shuffle_i32x4(a, b, 0x88); }
inline Words odd_quarters(Words a, Words b) { return _mm512_shuffle_i32x4(a, b, 0xdd); }
inline Words look_up(Words x, __m128i table) {  // a byte of the table for the lower four bits of each byte
  const __m512i four = _mm512_broadcast_i32x4(table);
#ifdef __AVX512VBMI__
  return _mm512_permutexvar_epi8(x, four);  // by the lower six bits
#else
  return _mm512_shuffle_epi8(four, _mm512_and_si512(x, _mm512_set1_epi8(0x0f)));
#endif
}
inline int32_t sum_lanes(Words x) { return _mm512_reduce_add_epi32(x); }
inline int32_t max_lanes(Words x) { return _mm512_reduce_max_epi32(x); }

inline Floats as_floats(Words x) { return _mm512_castsi512_ps(x); }
inline Words as_words(Floats x) { return _mm512_castps_si512(x); }
inline Floats to_floats(Words x) { return _mm512_cvtepi32_ps(x); }
inline Words to_ints(Floats x) { return _mm512_cvtps_epi32(x); }
inline Words from_unsigned(__m128i bytes) { return _mm512_cvtepu8_epi32(bytes); }
inline Words from_signed(__m128i bytes) { return _mm512_cvtepi8_epi32(bytes); }
inline Words from_halves(__m256i x) { return _mm512_cvtepu16_epi32(x); }
inline __m128i to_bytes(Words x) { return _mm512_cvtepi32_epi8(x); }
inline __m256i to_halves(Words x) { return _mm512_cvtepi32_epi16(x); }

inline Lanes lanes_before(int64_t count) {
  return count >= 16 ? Lanes(0xffff) : count <= 0 ? Lanes(0) : Lanes((1u << count) - 1);
}
inline unsigned bits(Lanes lanes) { return lanes; }
inline Lanes less(Words a, Words b) { return _mm512_cmplt_epi32_mask(a, b); }
inline Lanes less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline Lanes at_most(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
inline Lanes equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Lanes are_numbers(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q); }
inline Floats where(Lanes lanes, Floats x) { return _mm512_maskz_mov_ps(lanes, x); }
inline Words where(Lanes lanes, Words x) { return _mm512_maskz_mov_epi32(lanes, x); }
inline Floats select(Lanes lanes, Floats a, Floats b) { return _mm512_mask_blend_ps(lanes, b, a); }

inline Floats load_lanes(const float* p, Lanes lanes) { return _mm512_maskz_loadu_ps(lanes, p); }
inline Words load_lanes(const int32_t* p, Lanes lanes) { return _mm512_maskz_loadu_epi32(lanes, p); }
inline __m256i load_first(const uint16_t* p, Lanes lanes) { return _mm256_maskz_loadu_epi16(lanes, p); }
inline void store_lanes(float* p, Lanes lanes, Floats x) { _mm512_mask_storeu_ps(p, lanes, x); }
inline void store_lanes(int32_t* p, Lanes lanes, Words x) { _mm512_mask_storeu_epi32(p, lanes, x); }
inline void store_first(uint16_t* p, Lanes lanes, __m256i x) { _mm256_mask_storeu_epi16(p, lanes, x); }
inline void store_first(int8_t* p, Lanes lanes, __m128i x) { _mm_mask_storeu_epi8(p, lanes, x); }
inline void store_chosen(float* p, Lanes lanes, Floats x) { _mm512_storeu_ps(p, _mm512_maskz_compress_ps(lanes, x)); }

// GCC 12 copies and spills the accumulators of loops over _mm512_dpbusd_epi32, which halves their speed.
template <int Bits> inline Words dot_quads(Words acc, Words w, Words x) {
#ifdef __AVX512VNNI__
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
  return acc;
#else
  if constexpr (Bits == 4)
    return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w, _mm512_set1_epi16(0xff)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(x, 8));
  return _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
#endif
}

}  // namespace baton
