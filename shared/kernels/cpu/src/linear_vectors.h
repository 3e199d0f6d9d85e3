// Rows of x times one panel with vectors. 64 columns are four vectors, and each row of x has four vectors of sums.
#pragma once
#include <algorithm>

#include "linear.h"

namespace baton::vectors {

#ifdef __AVX512F__
constexpr int kMaxRows = 6;
#else
constexpr int kMaxRows = 4;  // dot_pairs needs both halves of the panel's vectors
#endif

// A panel is read in chunks of this many k, which are 128 KB. One chunk serves all rows from the L2 while the next
// chunk is prefetched. At most kBlockRows rows keep their sums between chunks.
constexpr int64_t kChunk = 1024, kBlockRows = 192;
constexpr int kLines = 2 * kPanel * sizeof(bf16) / 64;  // cache lines of a pair of k

// A range of k of a panel and of rows of x, as they are or as factors.
template <class Element>
struct Chunk {
  const Element* x;
  const bf16* panel;
  int64_t stride;  // elements from row to row of x
  int64_t pairs;   // of k
  bool is_first;   // sums begin with zero, and those of later chunks with y
};

inline Chunk<bf16> factors_of(const Chunk<bf16>& chunk, int64_t, bf16*) { return chunk; }
inline Chunk<float> factors_of(const Chunk<bf16>& chunk, int64_t rows, float* wide) {  // [rows][kChunk]
  const int64_t width = 2 * chunk.pairs;
  for (int64_t row = 0; row < rows; row++) {
    const bf16* const x = chunk.x + row * chunk.stride;
    for (int64_t k = 0; k < width; k += 16) store(wide + row * kChunk + k, load_lanes(x + k, lanes_below(width, k)));
  }
  return {wide, chunk.panel, kChunk, chunk.pairs, chunk.is_first};
}

// y[r][16 * J] = the sums of row r of R rows. Each lane adds up its products in the order of k, so the result does not
// depend on R. For each pair of k, kFetched lines from `ahead` on are prefetched into the L2.
template <int R, int J, int kFetched>
inline void sum_columns(const Chunk<Factor>& chunk, const char* ahead, float* y) {
  const bf16* panel = chunk.panel;
  Floats sums[R][J];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < J; j++)
      sums[r][j] = chunk.is_first ? floats(0.0f) : load_floats(y + r * kPanel + 16 * j);
  for (int64_t pair = 0; pair < chunk.pairs; pair++, panel += 2 * kPanel, ahead += 64 * kFetched) {
#pragma GCC unroll 2
    for (int line = 0; line < kFetched; line++) _mm_prefetch(ahead + 64 * line, _MM_HINT_T1);
    Words w[J];
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) w[j] = load_words(panel + 32 * j);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) sums[r][j] = dot_pairs(sums[r][j], chunk.x + r * chunk.stride + 2 * pair, w[j]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) store(y + r * kPanel + 16 * j, sums[r][j]);
}

// The same for all 64 columns.
template <int R, int kFetched>
void sum_rows(const Chunk<Factor>& chunk, const char* ahead, float* y) {
  constexpr int J = vectors_at_once(R);
  sum_columns<R, J, kFetched>(chunk, ahead, y);
  for (int j = J; j < 4; j += J) {
    Chunk<Factor> rest = chunk;
    rest.panel += 32 * j;
    sum_columns<R, J, 0>(rest, nullptr, y + 16 * j);
  }
}

template <int R>
void sum_rows(int64_t fetched, const Chunk<Factor>& chunk, const char* ahead, float* y) {
  switch (fetched) {
    case 0: return sum_rows<R, 0>(chunk, ahead, y);
    case 1: return sum_rows<R, 1>(chunk, ahead, y);
    case 2: return sum_rows<R, 2>(chunk, ahead, y);
    default: return sum_rows<R, kLines>(chunk, ahead, y);
  }
}

// The same for up to kMaxRows rows and kChunk of k, and for all lines of a pair or up to 2.
inline void sum_rows(int64_t rows, int64_t fetched, const Chunk<bf16>& values, const char* ahead, float* y) {
  alignas(64) Factor wide[kMaxRows * kChunk];
  const Chunk<Factor> chunk = factors_of(values, rows, wide);
  switch (rows) {
    case 1: return sum_rows<1>(fetched, chunk, ahead, y);
    case 2: return sum_rows<2>(fetched, chunk, ahead, y);
    case 3: return sum_rows<3>(fetched, chunk, ahead, y);
    case 4: return sum_rows<4>(fetched, chunk, ahead, y);
    case 5: return sum_rows<5>(fetched, chunk, ahead, y);
    default: return sum_rows<6>(fetched, chunk, ahead, y);
  }
}

// Calls finish(row, y) for rows [begin, end) of x times the panel, at most kBlockRows. `next` is the panel after it.
//
// Where rows take several steps, the first step would wait for the panel to come from memory. So each step prefetches
// a share of the next chunk. 16 rows then run at 0.97 of the peak of vdpbf16ps on Zen 4. A single step prefetches,
// if at all, what it reads itself kAhead later.
template <class Finish>
void block_times_panel(const bf16* x, int64_t begin, int64_t end, int64_t k, const bf16* panel, const bf16* next,
                       Finish&& finish) {
  alignas(64) float sums[kBlockRows * kPanel];
  const int64_t steps = (end - begin + kMaxRows - 1) / kMaxRows;
  const int64_t num_chunks = (k + kChunk - 1) / kChunk, width = (k / 2 + num_chunks - 1) / num_chunks * 2;
  for (int64_t first = 0; first < k; first += width) {
    const int64_t after = std::min(k, first + width), pairs = (after - first) / 2;
    const bf16* const next_chunk = after < k ? panel + kPanel * after : next;
    const char* ahead = reinterpret_cast<const char*>(steps == 1 ? panel + kPanel * first : next_chunk);
    if (steps == 1) ahead += kAhead;
    for (int64_t step = 0, row = begin; step < steps; step++) {
      const int64_t rows = (end - row + steps - step - 1) / (steps - step);
      const int64_t fetched = fetched_by(step, steps, kLines);
      float* y = sums + (row - begin) * kPanel;
      sum_rows(rows, fetched, {x + row * k + first, panel + kPanel * first, k, pairs, first == 0}, ahead, y);
      ahead += 64 * fetched * pairs;
      for (const int64_t last = row + rows; row < last; row++, y += kPanel)
        if (after == k) finish(row, y);
    }
  }
}

// The same for any number of rows.
template <class Finish>
void rows_times_panel(const bf16* x, int64_t begin, int64_t end, int64_t k, const bf16* panel, const bf16* next,
                      Finish&& finish) {
  for (int64_t row = begin; row < end; row += kBlockRows)
    block_times_panel(x, row, std::min(end, row + kBlockRows), k, panel, next, finish);
}

}  // namespace baton::vectors
