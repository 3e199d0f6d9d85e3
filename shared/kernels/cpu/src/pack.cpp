// Packs row-major weights [rows][k], of a mapped file or of a tensor, into panels.
#include "linear.h"

#include <algorithm>

namespace baton {
namespace {

// Rows of a weight become columns of panels. Group g holds columns [16 g, 16 g + 16), and lane i of it is row
// 16 g + i - first. place(g) is the address of the group's pairs of k = 0, 1. The pairs of the next k follow 2 * kPanel elements later.
template <class Place>
void pack(Team& team, const bf16* weight, int64_t rows, int64_t k, int64_t stride, int64_t first, Place&& place) {
  const int64_t first_group = first / 16, end_group = (first + rows + 15) / 16, pairs = k / 2;
  team.each(end_group - first_group, [&](int64_t i) {
    const int64_t group = first_group + i, row = 16 * group - first;  // of lane 0; may be negative
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

// Packs weight [rows][k], `stride` elements from row to row, into columns [first_column, first_column + rows) of panels
// [..][k / 2][64][2]. Columns that are never packed must be zero already.
extern "C" void baton_pack_linear(Team* team, const bf16* weight, int64_t rows, int64_t k, int64_t stride, bf16* panels,
                                  int64_t first_column) {
  baton::pack(*team, weight, rows, k, stride, first_column,
              [&](int64_t group) { return panels + group / 4 * kPanel * k + group % 4 * 32; });
}

// Packs gate (is_up 0) or up (1) [rows][k] into the first or second half of each panel of linear_silu_mul.
extern "C" void baton_pack_gate_up(Team* team, const bf16* weight, int64_t rows, int64_t k, int64_t stride, bf16* panels,
                                   int64_t is_up) {
  baton::pack(*team, weight, rows, k, stride, 0,
              [&](int64_t group) { return panels + group / 2 * kPanel * k + (group % 2 + 2 * is_up) * 32; });
}
