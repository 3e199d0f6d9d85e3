// Registers of decode attention: 1, 2 or 4 query heads of one KV head at once.
//
// A register of scores or of weights holds [quad of tokens][head][token of the quad]: 16 / Heads tokens of each head.
// A row of K is read in parts that are repeated for each head, so that one dot product serves all heads. Then 16 /
// Heads lanes of each head are left to add up, instead of 16.
#pragma once
#include "attention_rows.h"

namespace baton::decode {

// The number of heads to compute at once, of a group with `left` more heads.
inline int64_t heads_at_once(int64_t left) { return left >= 4 ? 4 : left >= 2 ? 2 : 1; }

// Adds up 16 / Heads registers of [head][part of a sum] into one register of scores.
template <int Heads>
inline __m512 sum_parts(const __m512 (&sums)[16 / Heads]) {
  __m512 quads[4 / Heads];
  for (int i = 0; i < 4 / Heads; i++) {
    const __m512 a = sums[4 * i], b = sums[4 * i + 1], c = sums[4 * i + 2], d = sums[4 * i + 3];
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    quads[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  }
  auto halve = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  if constexpr (Heads == 4) return quads[0];
  else if constexpr (Heads == 2) return halve(quads[0], quads[1]);
  else return halve(halve(quads[0], quads[1]), halve(quads[2], quads[3]));
}

// The maximum over the lanes of each head, in all lanes of the head.
template <int Heads>
inline __m512 max_of_heads(__m512 x) {
  x = _mm512_max_ps(x, _mm512_permute_ps(x, 0xb1));
  x = _mm512_max_ps(x, _mm512_permute_ps(x, 0x4e));
  if constexpr (Heads <= 2) x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  if constexpr (Heads == 1) x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  return x;
}

// The token of each lane, counted within the register.
template <int Heads>
inline __m512i token_of_lane() {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i quad = _mm512_srli_epi32(lane, Heads == 1 ? 2 : Heads == 2 ? 3 : 4);
  return _mm512_or_si512(_mm512_slli_epi32(quad, 2), _mm512_and_si512(lane, _mm512_set1_epi32(3)));
}

}  // namespace baton::decode
