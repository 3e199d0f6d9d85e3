// Packs row-major weights [rows][units of k], of a mapped file or of a tensor, into panels. A unit has 4 bytes (linear.h).
#include "linear.h"

#include <algorithm>

namespace baton {
namespace {

using Unit = int32_t;

// Rows of a weight become columns of panels. Group g holds columns [16 g, 16 g + 16), and lane i of it is row
// 16 g + i - first. place(g) is the address of the group's first units. Those of the next k follow kPanel units later.
template <class Place>
void pack(Team& team, const Unit* weight, int64_t rows, int64_t units, int64_t stride, int64_t first, Place&& place) {
  const int64_t first_group = first / 16, end_group = (first + rows + 15) / 16;
  team.each(end_group - first_group, [&](int64_t i) {
    const int64_t group = first_group + i, row = 16 * group - first;  // of lane 0; may be negative
    const Lanes lanes = lanes_below(rows, row) & ~lanes_below(0, row);
    Unit* to = place(group);
    for (int64_t unit = 0; unit < units; unit += 16) {
      const Lanes there = lanes_below(units, unit);
      Words columns[16];
#pragma GCC unroll 16
      for (int lane = 0; lane < 16; lane++)
        columns[lane] = bits(lanes) >> lane & 1 ? load_lanes(weight + (row + lane) * stride + unit, there) : words(0);
      transpose(columns);
      for (int64_t j = 0; j < std::min<int64_t>(16, units - unit); j++, to += kPanel)
        store_lanes(to, lanes, columns[j]);
    }
  });
}

}  // namespace
}  // namespace baton

using baton::kPanel, baton::Team, baton::Unit;

// Packs weight [rows][units], `stride` units from row to row, into columns [first_column, first_column + rows) of panels
// [..][units][64]. Columns that are never packed must be zero already.
extern "C" void baton_pack_linear(Team* team, const Unit* weight, int64_t rows, int64_t units, int64_t stride,
                                  Unit* panels, int64_t first_column) {
  baton::pack(*team, weight, rows, units, stride, first_column,
              [&](int64_t group) { return panels + group / 4 * kPanel * units + group % 4 * 16; });
}

// Packs gate (is_up 0) or up (1) [rows][units] into the first or second half of each panel of linear_silu_mul.
extern "C" void baton_pack_gate_up(Team* team, const Unit* weight, int64_t rows, int64_t units, int64_t stride,
                                   Unit* panels, int64_t is_up) {
  baton::pack(*team, weight, rows, units, stride, 0,
              [&](int64_t group) { return panels + group / 2 * kPanel * units + (group % 2 + 2 * is_up) * 16; });
}
