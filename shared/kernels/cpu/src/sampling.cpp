// The slow twin is shared/engine/sampler.py. It explains why filters cut by value and the inverse CDF goes by id.
//
// Nothing is sorted. A threshold is found by bisection over the bits of the probabilities, among ever fewer
// candidates. The bits of positive floats have the order of their values.
#include "sampling.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "status.h"
#include "vec.h"

namespace baton {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kBlock = 256;          // probabilities that are added up at once on the way to the drawn token
constexpr int64_t kFewCandidates = 128;  // with fewer candidates another selection does not pay

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The largest value. NaNs are ignored.
float largest(const float* x, int64_t n) {
  Floats best[4];
  for (auto& b : best) b = floats(-kInfinity);
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; j++) best[j] = max(load_floats(x + i + 16 * j), best[j]);
  for (; i < n; i += 16)
    best[0] = max(select(lanes_below(n, i), load_lanes(x + i, lanes_below(n, i)), floats(-kInfinity)), best[0]);
  return max_lanes(max(max(best[0], best[1]), max(best[2], best[3])));
}

// The first index of `value`. 0 where there is none.
int64_t first_at(const float* x, int64_t n, float value) {
  for (int64_t i = 0; i < n; i += 16) {
    const Floats these = load_lanes(x + i, lanes_below(n, i));
    const unsigned at = bits(lanes_below(n, i) & equal(these, floats(value)));
    if (at != 0) return i + __builtin_ctz(at);
  }
  return 0;
}

// Replaces logits by exp(x / temperature - top / temperature): probabilities, scaled so that the likeliest is 1.
void to_probabilities(float* x, int64_t n, float top, float temperature) {
  const Floats t = floats(temperature);
  const Floats shift = floats(top) / t;
  for (int64_t i = 0; i < n; i += 16) {
    const Floats logits = load_lanes(x + i, lanes_below(n, i));
    store_lanes(x + i, lanes_below(n, i), exp16(logits / t - shift));
  }
}

// Adds up the chosen ones of 16 floats in 8 double lanes.
Doubles add_wide(Doubles sum, Lanes chosen, Floats x) {
  x = where(chosen, x);
  return sum + lower_doubles(x) + upper_doubles(x);
}

struct Weight {
  int64_t count;
  double mass;
};

// The number and the sum of the values larger than `pivot`.
Weight above(const float* p, int64_t n, float pivot) {
  const Floats limit = floats(pivot);
  Doubles mass = doubles(0.0);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const Floats x = load_lanes(p + i, lanes_below(n, i));
    const Lanes chosen = lanes_below(n, i) & less(limit, x);
    count += __builtin_popcount(bits(chosen));
    mass = add_wide(mass, chosen, x);
  }
  return {count, sum_lanes(mass)};
}

// Copies the values from low to high, and returns their number. `out` may be `p`, or has room for 16 more.
int64_t pick(const float* p, int64_t n, float low, float high, float* out) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const Floats x = load_lanes(p + i, lanes_below(n, i));
    const Lanes chosen = lanes_below(n, i) & at_most(floats(low), x) & at_most(x, floats(high));
    store_chosen(out + kept, chosen, x);
    kept += __builtin_popcount(bits(chosen));
  }
  return kept;
}

struct Cut {
  float at;
  Weight above;  // number and sum of the values larger than `at`
};

// The smallest value of p (in [0, 1]) with less than `limit` above it, by the count or by the mass. 0 where all
// values together are less. `candidates` is scratch for n / 2 + 16.
template <class Measure>
Cut smallest_with_less_above(const float* p, int64_t n, Measure measure, double limit, float* candidates) {
  uint32_t low = 0, high = 0x3f800000;  // bits of 0 and 1; the answer is between them
  int64_t from_low = n;                 // the number of values of at least `low`
  Weight over{0, 0.0};                  // the values larger than `high`
  Weight left_out{0, 0.0};              // the values larger than `high` at the last selection of candidates
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    Weight found = above(p, n, from_bits(middle));
    found = {found.count + left_out.count, found.mass + left_out.mass};
    if (measure(found) < limit) {
      high = middle;
      over = found;
    } else {
      low = middle + 1;
      from_low = found.count;
    }
    if (n > kFewCandidates && 2 * (from_low - over.count) <= n) {
      n = pick(p, n, from_bits(low), from_bits(high), candidates);
      p = candidates;
      left_out = over;
    }
  }
  return {from_bits(high), over};
}

// The threshold of the filters: top-k, then top-p of the mass that is left, and min-p.
float threshold(const float* p, int64_t n, int64_t top_k, float top_p, float min_p, std::vector<float>& candidates) {
  const bool limits_k = top_k > 0 && top_k < n;
  float lowest = 0.0f;
  double mass = 0.0;
  if (limits_k || top_p < 1.0f) candidates.resize(n / 2 + 16);
  if (limits_k) {
    const auto count = [](const Weight& weight) { return double(weight.count); };
    const Cut cut = smallest_with_less_above(p, n, count, double(top_k), candidates.data());
    lowest = cut.at;
    mass = cut.above.mass + double(top_k - cut.above.count) * cut.at;  // of exactly top_k values, with ties too
  }
  if (top_p < 1.0f) {
    if (!limits_k) mass = above(p, n, 0.0f).mass;
    const auto of_mass = [](const Weight& weight) { return weight.mass; };
    lowest = std::max(lowest, smallest_with_less_above(p, n, of_mass, top_p * mass, candidates.data()).at);
  }
  return std::max(lowest, min_p);  // the likeliest has probability 1 here
}

// The first id at which the cumulative probability of the values not below `lowest` exceeds `uniform` times their
// sum. -1 where all probabilities are zero.
int64_t draw(const float* p, int64_t n, float lowest, double uniform, std::vector<double>& block_mass) {
  const Floats limit = floats(lowest);
  double total = 0.0;
  block_mass.clear();
  for (int64_t first = 0; first < n; first += kBlock) {
    Doubles sum = doubles(0.0);
    for (int64_t i = first; i < std::min(first + kBlock, n); i += 16) {
      const Floats x = load_lanes(p + i, lanes_below(n, i));
      sum = add_wide(sum, lanes_below(n, i) & at_most(limit, x), x);
    }
    block_mass.push_back(sum_lanes(sum));
    total += block_mass.back();
  }
  const double target = uniform * total;
  double before = 0.0;
  int64_t last = -1;  // a sum in another order may be smaller than the target by its last bit
  for (int64_t first = 0; first < n; first += kBlock) {
    const double mass = block_mass[first / kBlock];
    if (mass > 0.0 && (before + mass > target || before + mass >= total)) {
      double cdf = before;
      for (int64_t i = first; i < std::min(first + kBlock, n); i++) {
        if (!(p[i] >= lowest) || p[i] <= 0.0f) continue;
        cdf += p[i];
        last = i;
        if (cdf > target) return i;
      }
    }
    before += mass;
  }
  return last;
}

}  // namespace

void sample(Team& team, float* logits, int64_t num_rows, int64_t vocab_size, const Sampling& s, int64_t* token_ids) {
  std::atomic<int64_t> next{0};
  team.run([&](int) {
    std::vector<float> candidates;
    std::vector<double> block_mass;
    for (int64_t row; (row = next.fetch_add(1, std::memory_order_relaxed)) < num_rows;) {
      float* x = logits + row * vocab_size;
      const float top = largest(x, vocab_size);
      token_ids[row] = first_at(x, vocab_size, top);
      if (s.temperatures == nullptr || s.temperatures[row] == 0.0f) continue;
      to_probabilities(x, vocab_size, top, s.temperatures[row]);
      const float lowest = threshold(x, vocab_size, s.top_ks[row], s.top_ps[row], s.min_ps[row], candidates);
      const int64_t drawn = draw(x, vocab_size, lowest, s.uniforms[row], block_mass);
      if (drawn >= 0) token_ids[row] = drawn;
    }
  });
}

}  // namespace baton

// `last_tokens` is the FutureMap. row_ids [num_rows] are the rows that sample.
extern "C" int64_t baton_sample(void* team, float* logits, int64_t num_rows, int64_t vocab_size,
                                const baton::Sampling* sampling, const int64_t* row_ids, int64_t* last_tokens,
                                int64_t* token_ids) {
  return baton::status_of([&] {
    baton::sample(*static_cast<baton::Team*>(team), logits, num_rows, vocab_size, *sampling, token_ids);
    for (int64_t i = 0; i < num_rows; i++) last_tokens[row_ids[i]] = token_ids[i];
    return baton::kDone;
  });
}
