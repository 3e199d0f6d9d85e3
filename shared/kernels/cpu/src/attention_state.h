// The softmax of rows over the blocks of a context, in the one order of decode and extend attention.
//
// A context is divided into splits of kSplit tokens and a split into blocks of kKeys, both counted from its first
// token. A row has a softmax state of its own for each split, to which the blocks are added in order. The states of
// the splits are merged in order, from the first of which the row sees a key. Keys that a row must not see have weight
// zero. So the result of a row depends on its query and its context only: not on the strip, task or team that computes
// it, nor on the chunk that it belongs to.
#pragma once
#include "attention_keys.h"

namespace baton {

constexpr int64_t kSplit = 512;
static_assert(kSplit % kKeys == 0);

// 2^x, relative error below 7.5e-5 (minimax polynomial of degree 3 on [0, 1)), a fiftieth of what bf16 rounds off.
inline Floats rough_exp2_16(Floats x) {
  const Floats f = fraction(x);
  Floats p = floats(7.802452264e-2f);
  p = fmadd(p, f, floats(2.260671554e-1f));
  p = fmadd(p, f, floats(6.958335405e-1f));
  p = fmadd(p, f, floats(9.999252186e-1f));
  return times_power(p, x);
}

// The softmax states of rows that lie one after the other. Weights are 2^(score - reference).
struct States {
  float* sums;        // [rows][dim], sums of weights times values, dims like PackedKeys::v
  float* totals;      // [rows][16], sums of weights by lane
  float* references;  // [rows], at most kHeadroom below the highest score
  int64_t dim;

  static int64_t num_floats(int64_t rows, int64_t dim) { return rows * (dim + 16) + (rows + 15) / 16 * 16; }
  static States in(float* floats, int64_t rows, int64_t dim) {
    return {floats, floats + rows * dim, floats + rows * (dim + 16), dim};
  }
  States from(int64_t row) const { return {sums + row * dim, totals + row * 16, references + row, dim}; }

  void clear(int64_t rows) const {
    std::fill(sums, sums + rows * dim, 0.0f);
    std::fill(totals, totals + rows * 16, 0.0f);
    std::fill(references, references + rows, kNoScore);
  }
};

// Weights may grow to 2^kHeadroom before the reference is raised, so it is hardly ever raised after the first keys.
// The relative rounding error of bf16 does not depend on the size of a weight, and the sums of all weights fit in
// float32.
constexpr float kHeadroom = 8;

[[gnu::noinline]] inline void raise_reference(float reference, const States& row) {
  const Floats shrink = floats(exp2_one(*row.references - reference));
  *row.references = reference;
  store(row.totals, load_floats(row.totals) * shrink);
  for (int64_t d = 0; d < row.dim; d += 16)
    store(row.sums + d, load_floats(row.sums + d) * shrink);
}

// The keys [begin, end) of a block that a row sees. They may lie before the block, behind it, or reach beyond it.
struct Visible {
  int64_t begin, end;
};

// Turns the products of the first row of `row` into weights. If kMasked, the weights of keys that it does not see are 0.
// With `scales` products are of codes, and so are those that the weights are for; the totals are of weights alone.
template <bool kMasked, class Factor>
[[gnu::always_inline]] inline void softmax_row(const float* products, Visible visible, Floats scale,
                                               const KeyScales* scales, const States& row, Factor* weights) {
  static_assert(kKeys == 64);
  Floats x[4], w[4];
  for (int i = 0; i < 4; i++) {
    x[i] = load_floats(products + 16 * i);
    if (scales) x[i] = x[i] * load_floats(scales->k + 16 * i);
    if (kMasked) {
      const Lanes seen = lanes_of_keys(16 * i, visible.end) & ~lanes_of_keys(16 * i, visible.begin);
      x[i] = select(seen, x[i], floats(-INFINITY));
    }
  }
  const Floats highest = max(max(x[0], x[1]), max(x[2], x[3])) * scale;
  if (bits(less(floats(*row.references + kHeadroom), highest)) != 0)
    raise_reference(max_lanes(highest), row);
  const Floats reference = floats(*row.references);
  for (int i = 0; i < 4; i++) {
    w[i] = rough_exp2_16(fmsub(x[i], scale, reference));
    store16(weights + 16 * i, scales ? w[i] * load_floats(scales->v + 16 * i) : w[i]);
  }
  const Floats sum = (w[0] + w[1]) + (w[2] + w[3]);
  store(row.totals, load_floats(row.totals) + sum);
}

// Adds the block that `strips` has taken to the states of rows [0, num_rows) with queries q [rows][dim]. Row i sees the
// keys visible(i) of the block. They neither begin nor end before those of the row before it.
template <class Strips, class VisibleTo>
[[gnu::always_inline]] inline void add_block(Strips& strips, const typename Strips::Factor* q, int64_t num_rows,
                                             Floats scale, const KeyScales* scales, const States& states,
                                             VisibleTo&& visible) {
  alignas(64) float products[Strips::kHeight * kKeys];
  alignas(64) typename Strips::Factor weights[Strips::kHeight * kKeys];
  for (int64_t first = 0; first < num_rows; first += Strips::kHeight) {
    const int64_t rows = std::min(Strips::kHeight, num_rows - first);
    const Visible of_first = visible(first), of_last = visible(first + rows - 1);
    if (of_first.begin >= kKeys || of_last.end <= 0) continue;
    strips.multiply_keys(rows, q + first * states.dim, products);
    const bool see_all = of_last.begin <= 0 && of_first.end >= kKeys;
    for (int64_t i = 0; i < rows; i++) {
      const States row = states.from(first + i);
      if (see_all) softmax_row<false>(products + i * kKeys, of_first, scale, scales, row, weights + i * kKeys);
      else softmax_row<true>(products + i * kKeys, visible(first + i), scale, scales, row, weights + i * kKeys);
    }
    strips.add_values(rows, weights, num_lanes(std::min(of_last.end, kKeys)), states.sums + first * states.dim);
  }
}

// Merges the first row of `part`, a later split, into that of `whole`.
inline void merge(const States& whole, const States& part) {
  const float reference = std::max(*whole.references, *part.references);
  const Floats keep = floats(exp2_one(*whole.references - reference));
  const Floats take = floats(exp2_one(*part.references - reference));
  auto blend = [&](float* to, const float* from) {
    store(to, fmadd(load_floats(from), take, load_floats(to) * keep));
  };
  for (int64_t d = 0; d < whole.dim; d += 16) blend(whole.sums + d, part.sums + d);
  blend(whole.totals, part.totals);
  *whole.references = reference;
}

// What the sums of the first row of `states` are multiplied by, with the sink of its head or null.
inline float result_factor(const States& states, const float* sink) {
  const float total = sum_lanes(load_floats(states.totals));
  if (sink == nullptr) return 1.0f / total;
  const float exponent = *sink * 1.44269504f, reference = std::max(*states.references, exponent);
  const float keep = exp2_one(*states.references - reference);
  return keep / (total * keep + exp2_one(exponent - reference));
}

// Stores the result of the first row of `states`.
inline void store_result(const States& states, int64_t head_dim, const float* sink, bf16* out) {
  const Floats factor = floats(result_factor(states, sink));
  for (int64_t c = 0; c < num_chunks(head_dim); c++) {
    const float* sums = states.sums + 32 * c;
    store_chunk(out, c, head_dim, load_floats(sums), load_floats(sums + 16), factor);
  }
}

}  // namespace baton
