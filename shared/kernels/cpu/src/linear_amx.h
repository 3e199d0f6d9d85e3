// Rows of x times one panel with AMX. 16 pairs of k by 16 columns of a panel have the layout of a tile.
//
// Every sum runs over k in steps of 32, for any number of rows. A single row is a tile of one row.
#pragma once
#include "amx.h"
#include "linear.h"

#ifdef BATON_HAS_AMX
namespace baton::amx {

constexpr int kTileRows = 16, kTileK = 32;  // of x; a tile of the panel has the same k by 16 columns
constexpr int kMaxRows = 2 * kTileRows;

inline bool usable(int64_t k) { return k % kTileK == 0 && permitted(); }

// Prefetches the lines of kTileK of a panel, kAhead from here.
inline void prefetch_ahead(const bf16* panel) {
  const char* const first = reinterpret_cast<const char*>(panel) + kAhead;
  for (int64_t at = 0; at < kTileK * kPanel * int64_t(sizeof(bf16)); at += 64) _mm_prefetch(first + at, _MM_HINT_T1);
}

// y[rows][64] for up to 16 rows, `row_size` elements from row to row, with the sums in tiles 0 to 3. The panel is in a
// cache, or else is prefetched.
inline void sum_16_rows(const bf16* x, int64_t row_size, int64_t k, const bf16* panel, bool is_cached, float* y) {
  zero<0>(), zero<1>(), zero<2>(), zero<3>();
  for (int64_t i = 0; i < k; i += kTileK, panel += kTileK * kPanel) {
    constexpr int64_t stride = 4 * kPanel;  // bytes of a pair of k in a panel
    if (!is_cached) prefetch_ahead(panel);
    load<4>(x + i, 2 * row_size);
    load<6>(panel, stride), dot<0, 4, 6>();
    load<7>(panel + 32, stride), dot<1, 4, 7>();
    load<6>(panel + 64, stride), dot<2, 4, 6>();
    load<7>(panel + 96, stride), dot<3, 4, 7>();
  }
  store<0>(y, 4 * kPanel), store<1>(y + 16, 4 * kPanel), store<2>(y + 32, 4 * kPanel), store<3>(y + 48, 4 * kPanel);
}

// y[rows][64] for 17 to 32 rows, 32 columns at a time, so that each loaded tile is used in two products.
inline void sum_32_rows(const bf16* x, int64_t row_size, int64_t k, const bf16* panel, bool is_cached, float* y) {
  for (int half = 0; half < 2; half++, panel += 64, y += 32, is_cached = true) {
    zero<0>(), zero<1>(), zero<2>(), zero<3>();
    const bf16* w = panel;
    for (int64_t i = 0; i < k; i += kTileK, w += kTileK * kPanel) {
      if (!is_cached) prefetch_ahead(w);
      load<4>(x + i, 2 * row_size), load<5>(x + kTileRows * row_size + i, 2 * row_size);
      load<6>(w, 4 * kPanel), dot<0, 4, 6>(), dot<2, 5, 6>();
      load<7>(w + 32, 4 * kPanel), dot<1, 4, 7>(), dot<3, 5, 7>();
    }
    float* lower = y + kTileRows * kPanel;
    store<0>(y, 4 * kPanel), store<1>(y + 16, 4 * kPanel), store<2>(lower, 4 * kPanel), store<3>(lower + 16, 4 * kPanel);
  }
}

inline Shapes shapes_of(int rows) {
  Shapes shapes;
  const int upper = rows < kTileRows ? rows : kTileRows, lower = rows - upper;
  if (lower == 0) {
    for (int sums : {0, 1, 2, 3}) shapes.set(sums, upper);
    shapes.set(4, upper);
  } else {
    for (int sums : {0, 1}) shapes.set(sums, upper), shapes.set(sums + 2, lower);
    shapes.set(4, upper), shapes.set(5, lower);
  }
  for (int panel : {6, 7}) shapes.set(panel, kTileK / 2);
  return shapes;
}

// Calls finish(row, y) for rows [begin, end) of x times the panel.
template <class Finish>
void rows_times_panel(const bf16* x, int64_t begin, int64_t end, int64_t k, const bf16* panel, Finish&& finish) {
  alignas(64) float y[kMaxRows * kPanel];
  int configured = 0;
  for (int64_t row = begin; row < end; row += kMaxRows) {
    const int rows = int(end - row < kMaxRows ? end - row : kMaxRows);
    if (rows != configured) configure(shapes_of(configured = rows));
    if (rows > kTileRows) sum_32_rows(x + row * k, k, k, panel, row > begin, y);
    else sum_16_rows(x + row * k, k, k, panel, row > begin, y);
    for (int r = 0; r < rows; r++) finish(row + r, y + r * kPanel);
  }
  release();
}

}  // namespace baton::amx
#endif
