#include "experts.h"

#include <algorithm>
#include <cmath>

#include "linear_epilogue.h"
#include "linear_panel.h"

namespace baton {
namespace {

constexpr int64_t kSlots = 4;  // of one task, which takes a microsecond or more

template <class F>
void each_slot(Team& team, int64_t num_slots, F&& f) {
  team.each((num_slots + kSlots - 1) / kSlots, [&](int64_t i) {
    for (int64_t slot = i * kSlots; slot < std::min(num_slots, (i + 1) * kSlots); slot++) f(slot);
  });
}

// The top_k experts of one token: the largest scores, of equal ones that of the lower index. NaN counts as the least.
void choose(const float* scores, int64_t num_experts, int64_t top_k, int32_t* chosen) {
  const auto is_above = [&](int64_t a, int64_t b) {
    return scores[a] > scores[b] || (std::isnan(scores[b]) && !std::isnan(scores[a]));
  };
  for (int64_t e = 0; e < num_experts; e++) {
    int64_t place = std::min(e, top_k);
    if (place == top_k && !is_above(e, chosen[--place])) continue;
    for (; place > 0 && is_above(e, chosen[place - 1]); place--) chosen[place] = chosen[place - 1];
    chosen[place] = int32_t(e);
  }
}

// scores[e] = exp(scores[e] - most). Returns their sum.
float exponentials(float* scores, int64_t num_experts, float most) {
  Floats sum = floats(0.0f);
  for (int64_t e = 0; e < num_experts; e += 16) {
    const Lanes lanes = lanes_below(num_experts, e);
    const Floats values = exp16(load_lanes(scores + e, lanes) - floats(most));
    store_lanes(scores + e, lanes, values);
    sum = sum + where(lanes, values);
  }
  return sum_lanes(sum);
}

// residual[token of the slot] += weight of the slot * (y + bias).
struct AddWeighted {
  float* residual;
  const int64_t* tokens;
  const float* weights;
  const float* bias;
  int64_t n;

  void operator()(int64_t slot, int64_t panel, const float* y) const {
    const Floats weight = floats(weights[slot]);
    for (int64_t i = 0, column = panel * kPanel; i < kPanel; i += 16, column += 16) {
      const Lanes lanes = lanes_below(n, column);
      float* const place = residual + tokens[slot] * n + column;
      const Floats sum = with_bias(y + i, bias, column, lanes);
      store_lanes(place, lanes, fmadd(weight, sum, load_lanes(place, lanes)));
    }
  }
};

}  // namespace

void Experts::add(Team& team, const ExpertsDesc& experts, const bf16* x, float* scores, int64_t m, float* residual) {
  if (m == 0) return;
  route(team, experts, scores, m);
  group(experts, m);
  bf16* const product = product_.of(int64_t(tokens_.size()) * experts.down[0].k);
  gate_up(team, experts, inputs(team, experts, x, m), product);
  down(team, experts, rows_of_slots(team, product, nullptr, experts.down, between_), residual);
}

// Chooses the experts of each token, and their weights.
void Experts::route(Team& team, const ExpertsDesc& experts, float* scores, int64_t m) {
  const int64_t n = experts.num_experts, k = experts.top_k;
  int32_t* const chosen = chosen_.of(m * k);
  float* const weights = chosen_weights_.of(m * k);
  team.each(m, [&](int64_t token) {
    float* const own = scores + token * n;
    int32_t* const best = chosen + token * k;
    choose(own, n, k, best);
    float total = exponentials(own, n, own[best[0]]);
    if (experts.normalized) {
      total = 0.0f;
      for (int64_t i = 0; i < k; i++) total += own[best[i]];
    }
    for (int64_t i = 0; i < k; i++) weights[token * k + i] = own[best[i]] / total;
  });
}

// Lists the slots of each expert, and the blocks of them that are computed at once.
void Experts::group(const ExpertsDesc& experts, int64_t m) {
  const int64_t k = experts.top_k, num_slots = m * k;
  const int32_t* const chosen = chosen_.of(num_slots);
  first_slots_.assign(experts.num_experts + 1, 0);
  for (int64_t i = 0; i < num_slots; i++) first_slots_[chosen[i] + 1]++;
  blocks_.clear();
  for (int64_t e = 0; e < experts.num_experts; e++) {
    const int64_t rows = first_slots_[e + 1], begin = first_slots_[e], end = begin + rows;
    first_slots_[e + 1] = end;
    if (rows == 0) continue;
    const int64_t block = rows_of_block(rows, experts.gate_up[e]);
    for (int64_t slot = begin; slot < end; slot += block) blocks_.push_back({e, slot, std::min(end, slot + block)});
  }
  tokens_.resize(num_slots);
  weights_.resize(num_slots);
  experts_.resize(num_slots);
  for (int64_t i = 0; i < num_slots; i++) {
    const int64_t slot = first_slots_[chosen[i]]++;
    tokens_[slot] = i / k;
    experts_[slot] = chosen[i];
    weights_[slot] = chosen_weights_.of(num_slots)[i];
  }
}

bool Experts::have_orders(const PackedLinear* weights) const {
  return std::any_of(blocks_.begin(), blocks_.end(), [&](const Block& each) { return weights[each.expert].order; });
}

// The rows of all slots for gate and up. A token is quantized once, unless its experts differ in the order of inputs.
Rows Experts::inputs(Team& team, const ExpertsDesc& experts, const bf16* x, int64_t m) {
  const PackedLinear& first = experts.gate_up[0];
  if (!first.takes_codes() || have_orders(experts.gate_up))
    return rows_of_slots(team, x, tokens_.data(), experts.gate_up, inputs_);
  const Codes from = token_codes_.of(m, first.k, first.group, nullptr);
  const Codes to = inputs_.codes.of(int64_t(tokens_.size()), first.k, first.group, nullptr);
  quantize(team, x, m, from);
  each_slot(team, int64_t(tokens_.size()), [&](int64_t slot) {
    const int64_t token = tokens_[slot], groups = to.groups();
    std::copy_n(from.values + token * to.k, to.k, to.values + slot * to.k);
    std::copy_n(from.scales + token * groups, groups, to.scales + slot * groups);
    std::copy_n(from.sums + token * groups, groups, to.sums + slot * groups);
  });
  return {nullptr, to};
}

// Row rows[slot] of x (null: row `slot`) for each slot, as the slot's expert reads it.
Rows Experts::rows_of_slots(Team& team, const bf16* x, const int64_t* rows, const PackedLinear* weights,
                            RowsScratch& scratch) {
  const PackedLinear& first = weights[0];
  const int64_t num_slots = int64_t(tokens_.size()), k = first.k;
  const auto row_of = [&](int64_t slot) { return x + (rows ? rows[slot] : slot) * k; };
  if (first.takes_codes()) {
    const Codes codes = scratch.codes.of(num_slots, k, first.group, nullptr);
    each_slot(team, num_slots, [&](int64_t slot) {
      Codes to = codes;
      to.order = weights[experts_[slot]].order;
      quantize_row(to, slot, row_of(slot));
    });
    return {nullptr, codes};
  }
  if (rows == nullptr && !have_orders(weights)) return {x};
  bf16* const values = scratch.values.of(num_slots * k);
  each_slot(team, num_slots, [&](int64_t slot) {
    const int32_t* const order = weights[experts_[slot]].order;
    const bf16* const from = row_of(slot);
    if (order == nullptr) std::copy_n(from, k, values + slot * k);
    else for (int64_t i = 0; i < k; i++) values[slot * k + i] = from[order[i]];
  });
  return {values};
}

// product [slots][size] = silu(gate) * up, or what clamps both. An expert's panels follow each other in memory, and so do
// its tasks.
void Experts::gate_up(Team& team, const ExpertsDesc& experts, const Rows& x, bf16* product) {
  const int64_t panels = panels_of(experts.gate_up[0]);
  team.each(int64_t(blocks_.size()) * panels, [&](int64_t task) {
    const Block& block = blocks_[task / panels];
    const PackedLinear& w = experts.gate_up[block.expert];
    const int64_t panel = task % panels;
    const auto multiply = [&](const auto& epilogue) {
      rows_times_panel(x, block.begin, block.end, w, panel, panel_begin(w, (panel + 1) % panels),
                       [&](int64_t slot, const float* y) { epilogue(slot, panel, y); });
    };
    if (experts.limit > 0) multiply(ClampedSiluMul{product, w.bias, w.n / 2, experts.limit, experts.alpha});
    else multiply(SiluMul{product, w.bias, w.n / 2});
  });
}

// Adds the outputs to the residual. A task has some panels of all experts, so no other thread adds to its columns. Where
// rows do not stay in the cache it has several panels, so that the rows are read fewer times.
void Experts::down(Team& team, const ExpertsDesc& experts, const Rows& x, float* residual) {
  const PackedLinear& first = experts.down[0];
  const int64_t panels = panels_of(first), nbytes = int64_t(tokens_.size()) * row_nbytes(first);
  const int64_t width = nbytes <= kRowsBytes ? 1 : std::max<int64_t>(panels / (4 * team.size()), 1);
  team.each((panels + width - 1) / width, [&](int64_t task) {
    const int64_t begin = task * width, end = std::min(panels, begin + width);
    for (const Block& block : blocks_) {
      const PackedLinear& w = experts.down[block.expert];
      const AddWeighted epilogue{residual, tokens_.data(), weights_.data(), w.bias, w.n};
      for (int64_t panel = begin; panel < end; panel++)
        rows_times_panel(x, block.begin, block.end, w, panel, panel_begin(w, (panel + 1) % panels),
                         [&](int64_t slot, const float* y) { epilogue(slot, panel, y); });
    }
  });
}

}  // namespace baton

using baton::bf16, baton::Experts, baton::ExpertsDesc, baton::Team;

extern "C" void baton_experts(Team* team, const ExpertsDesc* experts, const bf16* x, float* scores, int64_t m,
                              float* residual) {
  Experts().add(*team, *experts, x, scores, m, residual);
}
