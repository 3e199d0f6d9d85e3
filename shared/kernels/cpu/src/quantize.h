// Codes of 8 bits for rows of activations, made anew for each token: x is about code * scale, with one scale for a group
// of a row.
//
// scale = max |x| / 127 of the group, and code = x * (127 / max |x|), rounded to the nearest, ties to even. This is what
// vLLM and SGLang compute for dynamic activations per token (group = k). Below 1e-36 codes are 0. A group with NaN or
// infinity has the codes 0 and the scale NaN or infinity, so its products are not finite either.
#pragma once
#include "threads.h"
#include "vec.h"

namespace baton {

struct Codes {
  int8_t* values;   // [m][k]
  float* scales;    // [m][k / group]
  int32_t* sums;    // [m][k / group], of the codes of a group
  int64_t k, group;
  const int32_t* order;  // [k], the element of x for each code. Null: those of x as they come

  int64_t groups() const { return k / group; }
};

// The codes of one row. values(i) returns elements [i, i + 16) of it, 0 where they are past k, and at(i) one of them.
template <class Values, class At>
void quantize_row(const Codes& to, int64_t row, Values&& values, At&& at) {
  const auto value = [&](int64_t i) {
    if (to.order == nullptr) return values(i);
    alignas(64) float elements[16] = {};
    for (int64_t lane = 0; lane < 16 && i + lane < to.k; lane++) elements[lane] = at(to.order[i + lane]);
    return load_floats(elements);
  };
  const Words magnitude = words(0x7fffffff);
  for (int64_t g = 0; g < to.groups(); g++) {
    const int64_t begin = g * to.group, end = begin + to.group;
    Words largest = words(0);  // as integers, so that a NaN is the largest of all
    for (int64_t i = begin; i < end; i += 16) {
      largest = max(largest, where(lanes_below(end, i), as_words(value(i)) & magnitude));
    }
    const int32_t largest_bits = max_lanes(largest);
    float most;
    std::memcpy(&most, &largest_bits, 4);
    const Floats inverse = floats(most < 1e-36f ? 0.0f : 127.0f / most);
    Words sum = words(0);
    for (int64_t i = begin; i < end; i += 16) {
      const Lanes lanes = lanes_below(end, i);
      const Floats x = value(i) * inverse;
      const Words codes = where(lanes & are_numbers(x), to_ints(x));
      sum = add(sum, codes);
      store_first(to.values + row * to.k + i, lanes, to_bytes(codes));
    }
    to.scales[row * to.groups() + g] = most / 127.0f;
    to.sums[row * to.groups() + g] = sum_lanes(sum);
  }
}

// The codes of a row x [k].
inline void quantize_row(const Codes& to, int64_t row, const bf16* x) {
  quantize_row(to, row, [&](int64_t i) { return load_lanes(x + i, lanes_below(to.k, i)); },
               [&](int64_t i) { return to_float(x[i]); });
}

void quantize(Team&, const bf16* x, int64_t m, const Codes& to);  // x [m][k]

}  // namespace baton
