// Row-major weights [rows][k] into panels, from wherever they lie (a mapped file, a tensor).
#include "linear.h"

#include <algorithm>

namespace baton {
namespace {

// Rows of 16 pairs, as 32-bit lanes, become columns.
void transpose(__m512i (&rows)[16]) {
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

// Rows of a weight become columns of panels: group g holds columns [16 g, 16 g + 16), row 16 g + lane - first each.
// place(g) is where the group's pairs of k = 0, 1 go; those of the next k are one panel's row, 2 * kPanel, behind.
template <class Place>
void pack(Team& team, const bf16* weight, int64_t rows, int64_t k, int64_t stride, int64_t first, Place&& place) {
  const int64_t first_group = first / 16, end_group = (first + rows + 15) / 16, pairs = k / 2;
  team.each(end_group - first_group, [&](int64_t i) {
    const int64_t group = first_group + i, row = 16 * group - first;  // of lane 0, below 0 where lanes belong to others
    const __mmask16 lanes = lanes_below(rows, row) & ~lanes_below(0, row);
    bf16* to = place(group);
    for (int64_t pair = 0; pair < pairs; pair += 16) {
      const __mmask16 there = lanes_below(pairs, pair);
      __m512i columns[16];
#pragma GCC unroll 16
      for (int lane = 0; lane < 16; lane++)
        columns[lane] = lanes >> lane & 1 ? _mm512_maskz_loadu_epi32(there, weight + (row + lane) * stride + 2 * pair)
                                          : _mm512_setzero_si512();
      transpose(columns);
      for (int64_t j = 0; j < std::min<int64_t>(16, pairs - pair); j++, to += 2 * kPanel)
        _mm512_mask_storeu_epi32(to, lanes, columns[j]);
    }
  });
}

}  // namespace
}  // namespace baton

using baton::bf16, baton::kPanel, baton::Team;

// weight [rows][k], `stride` elements a row, becomes columns [first_column, first_column + rows) of panels [..][k / 2][64][2].
// Columns that nobody packs must hold zeros already.
extern "C" void baton_pack_linear(Team* team, const bf16* weight, int64_t rows, int64_t k, int64_t stride, bf16* panels,
                                  int64_t first_column) {
  baton::pack(*team, weight, rows, k, stride, first_column,
              [&](int64_t group) { return panels + group / 4 * kPanel * k + group % 4 * 32; });
}

// gate (is_up 0) or up (1) [rows][k] becomes the first or the second half of each panel of linear_silu_mul.
extern "C" void baton_pack_gate_up(Team* team, const bf16* weight, int64_t rows, int64_t k, int64_t stride, bf16* panels,
                                   int64_t is_up) {
  baton::pack(*team, weight, rows, k, stride, 0,
              [&](int64_t group) { return panels + group / 2 * kPanel * k + (group % 2 + 2 * is_up) * 32; });
}
