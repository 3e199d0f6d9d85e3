// Some rows of x times one panel with AVX512: 64 columns are four registers, each row of x has four sums in registers.
#pragma once
#include "linear.h"

namespace baton::avx512 {

#ifdef __AVX512BF16__
constexpr int kMaxRows = 6;  // 24 sums, 4 registers of the panel, 1 of x
#else
constexpr int kMaxRows = 4;  // dot_pairs keeps both halves of the panel's registers
#endif

// Memory to fetch into the cache beside the arithmetic, so many bytes for each pair of k.
struct Ahead {
  const char* from;
  int64_t step;
};

// y[r][64] = the sums of row r over the panel; k ascends in one chain a lane, so R does not show in the result.
template <int R>
void sum_rows(const bf16* x, int64_t k, const bf16* panel, Ahead ahead, float* y) {
  __m512 sums[R][4];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) sums[r][j] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < k / 2; pair++, panel += 2 * kPanel, ahead.from += ahead.step) {
    _mm_prefetch(ahead.from, _MM_HINT_T0);
    __m512i w[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) w[j] = _mm512_loadu_si512(panel + 32 * j);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int32_t both;
      std::memcpy(&both, x + r * k + 2 * pair, 4);
      const __m512i xr = _mm512_set1_epi32(both);
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) sums[r][j] = dot_pairs(sums[r][j], xr, w[j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) _mm512_storeu_ps(y + r * kPanel + 16 * j, sums[r][j]);
}

// The same for up to kMaxRows rows.
inline void sum_rows(int rows, const bf16* x, int64_t k, const bf16* panel, Ahead ahead, float* y) {
  switch (rows) {
    case 1: return sum_rows<1>(x, k, panel, ahead, y);
    case 2: return sum_rows<2>(x, k, panel, ahead, y);
    case 3: return sum_rows<3>(x, k, panel, ahead, y);
    case 4: return sum_rows<4>(x, k, panel, ahead, y);
    case 5: return sum_rows<5>(x, k, panel, ahead, y);
    default: return sum_rows<6>(x, k, panel, ahead, y);
  }
}

// finish(row, y) for rows [begin, end) of x times the panel. `next` is the panel that comes after it.
//
// The first step reads the panel from memory, as fast as that goes if it has as many rows as possible (DRAM feeds 8 rows
// or so on a Zen 4 core), and hardware prefetch needs no help. Later steps have it in the cache; they fetch what `next`
// will need, where a step has arithmetic enough to hide one line for each pair of k.
template <class Finish>
void rows_times_panel(const bf16* x, int64_t begin, int64_t end, int64_t k, const bf16* panel, const bf16* next,
                      Finish&& finish) {
  alignas(64) float y[6 * kPanel];
  const char* to_fetch = reinterpret_cast<const char*>(next);
  const char* const fetched = to_fetch + 2 * kPanel * k;
  for (int64_t row = begin; row < end;) {
    const int64_t left = end - row, steps = (left + kMaxRows - 1) / kMaxRows;
    const int rows = int(row == begin && left > kMaxRows ? kMaxRows : (left + steps - 1) / steps);
    const bool fetches = row > begin && rows >= kMaxRows - 1 && to_fetch < fetched;
    const Ahead ahead = fetches ? Ahead{to_fetch, 64} : Ahead{reinterpret_cast<const char*>(panel), 0};
    sum_rows(rows, x + row * k, k, panel, ahead, y);
    if (fetches) to_fetch += 64 * (k / 2);
    for (int r = 0; r < rows; r++) finish(row + r, y + r * kPanel);
    row += rows;
  }
}

}  // namespace baton::avx512
