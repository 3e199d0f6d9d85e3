// Rows of codes times one panel of codes with vectors. Products are added up as integers, four vectors for each row.
#pragma once
#include <algorithm>

#include "code_kinds.h"
#include "linear.h"

namespace baton::int8 {

constexpr int kMaxRows = 6;
constexpr int kUnitLines = 4 * kPanel / 64;  // cache lines of a unit of k

// A group of k of a panel and of rows of x.
struct Group {
  const uint8_t* panel;
  const int8_t* x;
  int64_t stride;  // bytes from row to row of x
  int64_t units;   // of the group
};

// sums[r] += the products of row r. For each unit, `fetched` lines from `ahead` on are prefetched into the L2.
template <class Code, int R, int J>
inline void add_products(const Group& group, int64_t fetched, const char* ahead, Words (&sums)[R][J]) {
  constexpr int kCodes = 32 / Code::kBits;  // of a unit
  const uint8_t* panel = group.panel;
  for (int64_t unit = 0; unit < group.units; unit++, panel += 4 * kPanel) {
    for (int64_t line = 0; line < fetched; line++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    Words w[J];
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) w[j] = load_words(panel + 64 * j);
    const auto add = [&](const Words (&codes)[J], int64_t k) {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        int32_t quad;
        std::memcpy(&quad, group.x + r * group.stride + k, 4);
        const Words xr = words(quad);
#pragma GCC unroll 4
        for (int j = 0; j < J; j++) sums[r][j] = dot_quads<Code::kBits>(sums[r][j], codes[j], xr);
      }
    };
    if constexpr (Code::kBits == 8) {
      add(w, kCodes * unit);
    } else {
      Words codes[J];
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) codes[j] = Code::lower(w[j]);
      add(codes, kCodes * unit);
#pragma GCC unroll 4
      for (int j = 0; j < J; j++) codes[j] = Code::upper(w[j]);
      add(codes, kCodes * unit + 4);
    }
  }
}

// One panel of a weight, and the scales and zeros of its columns.
template <class Code>
struct Panel {
  const uint8_t* codes;
  const typename Code::Scale* scales;  // [k / group][64]
  const uint8_t* zeros;                // the same, or null
};

template <class Code>
Panel<Code> panel_of(const PackedLinear& w, int64_t panel) {
  const int64_t nbytes = w.k * Code::kBits / 8 * kPanel, scales = w.k / w.group * kPanel;
  return {static_cast<const uint8_t*>(w.panels) + panel * nbytes,
          static_cast<const typename Code::Scale*>(w.scales) + panel * scales,
          w.zeros ? w.zeros + panel * scales : nullptr};
}

// The sums begin with -zero * (the sum of x), which is the same as taking the zeros from the codes.
template <class Code>
inline Words first_sums(const uint8_t* zeros, int32_t sum_of_x) {
  if (zeros == nullptr) return words(-sum_of_x * Code::kZero);
  return multiply(from_unsigned(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros))), words(-sum_of_x));
}

// The scales of 16 * J columns.
template <class Code, int J>
struct Scales {
  Floats of[J];

  explicit Scales(const typename Code::Scale* p) {
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) of[j] = Code::scales(p + 16 * j);
  }
};

// y [16 * J] (+)= sums * scales of x and of the columns.
template <class Code, int J>
void scale_sums(const Words (&sums)[J], float scale_of_x, const Scales<Code, J>& scales, bool is_first, float* y) {
#pragma GCC unroll 4
  for (int j = 0; j < J; j++) {
    const Floats scale = floats(scale_of_x) * scales.of[j];
    const Floats sum = to_floats(sums[j]);
    store(y + 16 * j, is_first ? sum * scale : fmadd(sum, scale, load_floats(y + 16 * j)));
  }
}

// y [R][64] (+)= group g of rows [row, row + R), for 16 * J columns from `column` on.
template <class Code, int R, int J>
inline void sum_columns(const Codes& x, int64_t row, const Panel<Code>& panel, int64_t g, int64_t column,
                        int64_t fetched, const char* ahead, float* y) {
  const int64_t units = x.group * Code::kBits / 32, groups = x.groups(), at = g * kPanel + column;
  Words sums[R][J];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < J; j++)
      sums[r][j] = first_sums<Code>(panel.zeros ? panel.zeros + at + 16 * j : nullptr, x.sums[(row + r) * groups + g]);
  const uint8_t* const codes = panel.codes + g * units * 4 * kPanel + 4 * column;
  add_products<Code>(Group{codes, x.values + row * x.k + g * x.group, x.k, units}, fetched, ahead, sums);
  const Scales<Code, J> scales(panel.scales + at);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    scale_sums(sums[r], x.scales[(row + r) * groups + g], scales, g == 0, y + r * kPanel + column);
}

// y [R][64] of rows [row, row + R).
template <class Code, int R>
void sum_rows(const Codes& x, int64_t row, const Panel<Code>& panel, int64_t fetched, const char* ahead, float* y) {
  constexpr int J = vectors_at_once(R);
  for (int64_t g = 0; g < x.groups(); g++, ahead += 64 * fetched * (x.group * Code::kBits / 32)) {
    sum_columns<Code, R, J>(x, row, panel, g, 0, fetched, ahead, y);
    for (int64_t column = 16 * J; column < kPanel; column += 16 * J)
      sum_columns<Code, R, J>(x, row, panel, g, column, 0, nullptr, y);
  }
}

// The same for up to kMaxRows rows.
template <class Code>
void sum_rows(int64_t rows, const Codes& x, int64_t row, const Panel<Code>& panel, int64_t fetched, const char* ahead,
              float* y) {
  switch (rows) {
    case 1: return sum_rows<Code, 1>(x, row, panel, fetched, ahead, y);
    case 2: return sum_rows<Code, 2>(x, row, panel, fetched, ahead, y);
    case 3: return sum_rows<Code, 3>(x, row, panel, fetched, ahead, y);
    case 4: return sum_rows<Code, 4>(x, row, panel, fetched, ahead, y);
    case 5: return sum_rows<Code, 5>(x, row, panel, fetched, ahead, y);
    default: return sum_rows<Code, 6>(x, row, panel, fetched, ahead, y);
  }
}

// Calls finish(row, y) for rows [begin, end) of x times the panel. `next` is the panel after it.
//
// As with bf16, each of several steps prefetches its share of the next panel, and a single step its own one.
template <class Code, class Finish>
void rows_times_panel(const Codes& x, int64_t begin, int64_t end, const Panel<Code>& panel, const uint8_t* next,
                      Finish&& finish) {
  alignas(64) float y[kMaxRows * kPanel];
  const int64_t steps = (end - begin + kMaxRows - 1) / kMaxRows, units = x.k * Code::kBits / 32;
  const char* ahead = reinterpret_cast<const char*>(steps == 1 ? panel.codes + kAhead : next);
  for (int64_t step = 0, row = begin; step < steps; step++) {
    const int64_t rows = (end - row + steps - step - 1) / (steps - step);
    const int64_t fetched = fetched_by(step, steps, kUnitLines);
    sum_rows<Code>(rows, x, row, panel, fetched, ahead, y);
    ahead += 64 * fetched * units;
    for (int64_t r = 0; r < rows; r++, row++) finish(row, y + r * kPanel);
  }
}

}  // namespace baton::int8
