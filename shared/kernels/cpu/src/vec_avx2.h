// The vectors of vec.h as pairs of registers of 256 bits. Every result has the bits that AVX512 would give.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace baton {

struct Floats {
  __m256 lower, upper;
};
struct Words {
  __m256i lower, upper;
};
struct Doubles {
  __m256d lower, upper;
};
struct Lanes {  // all bits of a chosen lane are 1
  __m256i lower, upper;
};

constexpr int vectors_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }  // at most 12 of 16 registers

inline __m256 lower(Floats x) { return x.lower; }
inline __m256 upper(Floats x) { return x.upper; }
inline Floats floats(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load_floats(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x.lower), _mm256_storeu_ps(p + 8, x.upper); }
inline Floats operator+(Floats a, Floats b) { return {a.lower + b.lower, a.upper + b.upper}; }
inline Floats operator-(Floats a, Floats b) { return {a.lower - b.lower, a.upper - b.upper}; }
inline Floats operator*(Floats a, Floats b) { return {a.lower * b.lower, a.upper * b.upper}; }
inline Floats operator/(Floats a, Floats b) { return {a.lower / b.lower, a.upper / b.upper}; }
inline Floats fmadd(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.lower, b.lower, c.lower), _mm256_fmadd_ps(a.upper, b.upper, c.upper)};
}
inline Floats fmsub(Floats a, Floats b, Floats c) {
  return {_mm256_fmsub_ps(a.lower, b.lower, c.lower), _mm256_fmsub_ps(a.upper, b.upper, c.upper)};
}
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.lower, b.lower), _mm256_max_ps(a.upper, b.upper)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.lower, b.lower), _mm256_min_ps(a.upper, b.upper)}; }
inline Floats floor(Floats x) { return {_mm256_floor_ps(x.lower), _mm256_floor_ps(x.upper)}; }
inline Floats nearest(Floats x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.lower, kMode), _mm256_round_ps(x.upper, kMode)};
}

inline __m256d lower(Doubles x) { return x.lower; }
inline __m256d upper(Doubles x) { return x.upper; }
inline Doubles doubles(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
inline Doubles to_doubles(__m256 x) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
}
inline Doubles lower_doubles(Floats x) { return to_doubles(x.lower); }
inline Doubles upper_doubles(Floats x) { return to_doubles(x.upper); }
inline Doubles operator+(Doubles a, Doubles b) { return {a.lower + b.lower, a.upper + b.upper}; }
inline Doubles operator*(Doubles a, Doubles b) { return {a.lower * b.lower, a.upper * b.upper}; }
inline Doubles fnmadd(Doubles a, Doubles b, Doubles c) {
  return {_mm256_fnmadd_pd(a.lower, b.lower, c.lower), _mm256_fnmadd_pd(a.upper, b.upper, c.upper)};
}
inline Doubles nearest(Doubles x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_pd(x.lower, kMode), _mm256_round_pd(x.upper, kMode)};
}
inline Floats to_floats(Doubles lower, Doubles upper) {
  return {_mm256_set_m128(_mm256_cvtpd_ps(lower.upper), _mm256_cvtpd_ps(lower.lower)),
          _mm256_set_m128(_mm256_cvtpd_ps(upper.upper), _mm256_cvtpd_ps(upper.lower))};
}
inline Words to_ints(Doubles lower, Doubles upper) {
  return {_mm256_set_m128i(_mm256_cvtpd_epi32(lower.upper), _mm256_cvtpd_epi32(lower.lower)),
          _mm256_set_m128i(_mm256_cvtpd_epi32(upper.upper), _mm256_cvtpd_epi32(upper.lower))};
}

inline Words words(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Words load_words(const void* p) {
  const __m256i* const from = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
inline Words load_half(const void* p) {
  return {_mm256_loadu_si256(static_cast<const __m256i*>(p)), _mm256_setzero_si256()};
}
inline Words load_quarters(const void* a, const void* b, const void* c, const void* d) {
  const auto load = [](const void* lower, const void* upper) {
    return _mm256_loadu2_m128i(static_cast<const __m128i*>(upper), static_cast<const __m128i*>(lower));
  };
  return {load(a, b), load(c, d)};
}
inline void store(void* p, Words x) {
  __m256i* const to = static_cast<__m256i*>(p);
  _mm256_storeu_si256(to, x.lower), _mm256_storeu_si256(to + 1, x.upper);
}
inline Words operator&(Words a, Words b) { return {a.lower & b.lower, a.upper & b.upper}; }
inline Words operator|(Words a, Words b) { return {a.lower | b.lower, a.upper | b.upper}; }
inline Words operator^(Words a, Words b) { return {a.lower ^ b.lower, a.upper ^ b.upper}; }
inline Words add(Words a, Words b) { return {_mm256_add_epi32(a.lower, b.lower), _mm256_add_epi32(a.upper, b.upper)}; }
inline Words subtract(Words a, Words b) {
  return {_mm256_sub_epi32(a.lower, b.lower), _mm256_sub_epi32(a.upper, b.upper)};
}
inline Words multiply(Words a, Words b) {
  return {_mm256_mullo_epi32(a.lower, b.lower), _mm256_mullo_epi32(a.upper, b.upper)};
}
inline Words max(Words a, Words b) { return {_mm256_max_epi32(a.lower, b.lower), _mm256_max_epi32(a.upper, b.upper)}; }
inline Words shift_left(Words x, int n) { return {_mm256_slli_epi32(x.lower, n), _mm256_slli_epi32(x.upper, n)}; }
inline Words shift_right(Words x, int n) { return {_mm256_srli_epi32(x.lower, n), _mm256_srli_epi32(x.upper, n)}; }
inline Words interleave_low_16(Words a, Words b) {
  return {_mm256_unpacklo_epi16(a.lower, b.lower), _mm256_unpacklo_epi16(a.upper, b.upper)};
}
inline Words interleave_high_16(Words a, Words b) {
  return {_mm256_unpackhi_epi16(a.lower, b.lower), _mm256_unpackhi_epi16(a.upper, b.upper)};
}
inline Words interleave_low_32(Words a, Words b) {
  return {_mm256_unpacklo_epi32(a.lower, b.lower), _mm256_unpacklo_epi32(a.upper, b.upper)};
}
inline Words interleave_high_32(Words a, Words b) {
  return {_mm256_unpackhi_epi32(a.lower, b.lower), _mm256_unpackhi_epi32(a.upper, b.upper)};
}
inline Words interleave_low_64(Words a, Words b) {
  return {_mm256_unpacklo_epi64(a.lower, b.lower), _mm256_unpacklo_epi64(a.upper, b.upper)};
}
inline Words interleave_high_64(Words a, Words b) {
  return {_mm256_unpackhi_epi64(a.lower, b.lower), _mm256_unpackhi_epi64(a.upper, b.upper)};
}
inline Words even_quarters(Words a, Words b) {
  return {_mm256_permute2x128_si256(a.lower, a.upper, 0x20), _mm256_permute2x128_si256(b.lower, b.upper, 0x20)};
}
inline Words odd_quarters(Words a, Words b) {
  return {_mm256_permute2x128_si256(a.lower, a.upper, 0x31), _mm256_permute2x128_si256(b.lower, b.upper, 0x31)};
}
template <class F> int32_t fold(Words x, F&& f) {
  int32_t lanes[16], result;
  store(lanes, x);
  result = lanes[0];
  for (int i = 1; i < 16; i++) result = f(result, lanes[i]);
  return result;
}
inline Words look_up(Words x, __m128i table) {  // a byte of the table for the lower four bits of each byte
  const __m256i both = _mm256_broadcastsi128_si256(table), mask = _mm256_set1_epi8(0x0f);
  return {_mm256_shuffle_epi8(both, x.lower & mask), _mm256_shuffle_epi8(both, x.upper & mask)};
}
inline int32_t sum_lanes(Words x) { return fold(x, [](int32_t a, int32_t b) { return a + b; }); }
inline int32_t max_lanes(Words x) { return fold(x, [](int32_t a, int32_t b) { return std::max(a, b); }); }

inline Floats as_floats(Words x) { return {_mm256_castsi256_ps(x.lower), _mm256_castsi256_ps(x.upper)}; }
inline Words as_words(Floats x) { return {_mm256_castps_si256(x.lower), _mm256_castps_si256(x.upper)}; }
inline Floats to_floats(Words x) { return {_mm256_cvtepi32_ps(x.lower), _mm256_cvtepi32_ps(x.upper)}; }
inline Words to_ints(Floats x) { return {_mm256_cvtps_epi32(x.lower), _mm256_cvtps_epi32(x.upper)}; }
inline Words from_unsigned(__m128i bytes) {
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes))};
}
inline Words from_signed(__m128i bytes) {
  return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes))};
}
inline Words from_halves(__m256i x) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))};
}
inline __m256i to_halves(Words x) {
  const __m256i mask = _mm256_set1_epi32(0xffff);
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(x.lower & mask, x.upper & mask), 0xd8);
}
inline __m128i to_bytes(Words x) {
  const __m256i halves = to_halves(x) & _mm256_set1_epi16(0xff);
  return _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

// Two factors, since 2^n itself may be no number of float32.
inline Floats times_power(Floats x, Floats n) {
  const Words whole = to_ints(floor(min(floats(254.0f), max(floats(-252.0f), n))));
  const Words half{_mm256_srai_epi32(whole.lower, 1), _mm256_srai_epi32(whole.upper, 1)};
  const auto power = [](Words exponent) { return as_floats(shift_left(add(exponent, words(127)), 23)); };
  return x * power(half) * power(subtract(whole, half));
}

inline Lanes less(Words a, Words b) {
  return {_mm256_cmpgt_epi32(b.lower, a.lower), _mm256_cmpgt_epi32(b.upper, a.upper)};
}
template <int Kind> Lanes compare(Floats a, Floats b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.lower, b.lower, Kind)),
          _mm256_castps_si256(_mm256_cmp_ps(a.upper, b.upper, Kind))};
}
inline Lanes less(Floats a, Floats b) { return compare<_CMP_LT_OQ>(a, b); }
inline Lanes at_most(Floats a, Floats b) { return compare<_CMP_LE_OQ>(a, b); }
inline Lanes equal(Floats a, Floats b) { return compare<_CMP_EQ_OQ>(a, b); }
inline Lanes are_numbers(Floats x) { return compare<_CMP_ORD_Q>(x, x); }
inline Lanes lanes_before(int64_t count) {
  const Words lanes{_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
  return less(lanes, words(int32_t(std::clamp<int64_t>(count, 0, 16))));
}
// The difference is rounded down, as by vreduceps. For an x below -1000 it is that of -1000, since no power of two of
// such an x is left.
inline Floats fraction(Floats x) {
  x = max(floats(-1000.0f), x);
  const Floats whole = floor(x), difference = x - whole;
  const Lanes above = less(x, difference + whole);  // -1 as integers
  return as_floats(add(as_words(difference), Words{above.lower, above.upper}));
}

inline Lanes operator&(Lanes a, Lanes b) { return {a.lower & b.lower, a.upper & b.upper}; }
inline Lanes operator~(Lanes lanes) { return {~lanes.lower, ~lanes.upper}; }
inline unsigned bits(Lanes lanes) {
  const auto of = [](__m256i x) { return unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(x))); };
  return of(lanes.lower) | of(lanes.upper) << 8;
}
inline Words where(Lanes lanes, Words x) { return {lanes.lower & x.lower, lanes.upper & x.upper}; }
inline Floats where(Lanes lanes, Floats x) { return as_floats(where(lanes, as_words(x))); }
inline Floats select(Lanes lanes, Floats a, Floats b) {
  return {_mm256_blendv_ps(b.lower, a.lower, _mm256_castsi256_ps(lanes.lower)),
          _mm256_blendv_ps(b.upper, a.upper, _mm256_castsi256_ps(lanes.upper))};
}

inline Floats load_lanes(const float* p, Lanes lanes) {
  return {_mm256_maskload_ps(p, lanes.lower), _mm256_maskload_ps(p + 8, lanes.upper)};
}
inline Words load_lanes(const int32_t* p, Lanes lanes) {
  return {_mm256_maskload_epi32(p, lanes.lower), _mm256_maskload_epi32(p + 8, lanes.upper)};
}
inline void store_lanes(float* p, Lanes lanes, Floats x) {
  _mm256_maskstore_ps(p, lanes.lower, x.lower), _mm256_maskstore_ps(p + 8, lanes.upper, x.upper);
}
inline void store_lanes(int32_t* p, Lanes lanes, Words x) {
  _mm256_maskstore_epi32(p, lanes.lower, x.lower), _mm256_maskstore_epi32(p + 8, lanes.upper, x.upper);
}
inline size_t count(Lanes lanes) { return size_t(__builtin_popcount(bits(lanes))); }
inline __m256i load_first(const uint16_t* p, Lanes lanes) {
  __m256i x{};
  if (count(lanes) == 16) x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  else std::memcpy(&x, p, count(lanes) * sizeof *p);
  return x;
}
inline void store_first(uint16_t* p, Lanes lanes, __m256i x) {
  if (count(lanes) == 16) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
  else std::memcpy(p, &x, count(lanes) * sizeof *p);
}
inline void store_first(int8_t* p, Lanes lanes, __m128i x) {
  if (count(lanes) == 16) _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x);
  else std::memcpy(p, &x, count(lanes));
}
inline void store_chosen(float* p, Lanes lanes, Floats x) {
  float values[16];
  store(values, x);
  for (unsigned left = bits(lanes); left != 0; left &= left - 1) *p++ = values[__builtin_ctz(left)];
}

template <int Bits> inline __m256i dot_quads(__m256i acc, __m256i w, __m256i x) {
#ifdef __AVXVNNI__
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
  return acc;
#else
  if constexpr (Bits == 4)
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
  const __m256i even = _mm256_madd_epi16(w & _mm256_set1_epi16(0xff), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
#endif
}
template <int Bits> inline Words dot_quads(Words acc, Words w, Words x) {
  return {dot_quads<Bits>(acc.lower, w.lower, x.lower), dot_quads<Bits>(acc.upper, w.upper, x.upper)};
}

}  // namespace baton
