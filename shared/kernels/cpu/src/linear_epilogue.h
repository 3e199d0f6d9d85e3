// Stores one row of a panel: 64 float32 sums y of row `row`, for columns from 64 * panel on. Columns past n are left
// out.
#pragma once
#include "linear.h"

namespace baton {

inline Floats with_bias(const float* y, const float* bias, int64_t column, Lanes lanes) {
  const Floats sum = load_floats(y);
  return bias ? sum + load_lanes(bias + column, lanes) : sum;
}

template <class Out>
struct Store {
  Out* out;
  const float* bias;
  int64_t n;

  void operator()(int64_t row, int64_t panel, const float* y) const {
    for (int64_t i = 0, column = panel * kPanel; i < kPanel; i += 16, column += 16) {
      const Lanes lanes = lanes_below(n, column);
      store_lanes(out + row * n + column, lanes, with_bias(y + i, bias, column, lanes));
    }
  }
};

struct Add {
  float* residual;
  const float* bias;
  int64_t n;

  void operator()(int64_t row, int64_t panel, const float* y) const {
    for (int64_t i = 0, column = panel * kPanel; i < kPanel; i += 16, column += 16) {
      const Lanes lanes = lanes_below(n, column);
      float* place = residual + row * n + column;
      const Floats sum = with_bias(y + i, bias, column, lanes);
      store_lanes(place, lanes, load_lanes(place, lanes) + sum);
    }
  }
};

// What is multiplied by a gate's sigmoid: the gate.
struct Silu {
  static Floats exponent(Floats gate) { return gate; }
};

// (1 + tanh(x / 2)) / 2 = sigmoid(x), here of x = sqrt(8 / pi) * (gate + 0.044715 * gate^3). Below -20 the sigmoid is 0 in
// float32, and x stays finite.
struct Gelu {
  static Floats exponent(Floats gate) {
    const Floats bounded = max(gate, floats(-20.0f));
    return bounded * fmadd(floats(0.0713548163f), bounded * bounded, floats(1.5957691216f));
  }
};

// out = gate * sigmoid(Gate::exponent(gate)) * up
template <class Gate>
struct GatedMul {
  bf16* out;
  const float* bias;  // [2 * size]: the gate's, then the up projection's
  int64_t size;       // columns of gate, of up and of out

  void operator()(int64_t row, int64_t panel, const float* y) const {
    constexpr int64_t half = kPanel / 2;
    for (int64_t i = 0, column = panel * half; i < half; i += 16, column += 16) {
      const Lanes lanes = lanes_below(size, column);
      const Floats gate = with_bias(y + i, bias, column, lanes);
      const Floats up = with_bias(y + half + i, bias, size + column, lanes);
      const Floats one_plus_exp = floats(1.0f) + exp16(floats(0.0f) - Gate::exponent(gate));
      store_lanes(out + row * size + column, lanes, gate / one_plus_exp * up);
    }
  }
};

using SiluMul = GatedMul<Silu>;
using GeluMul = GatedMul<Gelu>;

// gate * sigmoid(alpha * gate) * (up + 1), gate at most `limit` and up within it. A NaN stays one.
struct ClampedSiluMul {
  bf16* out;
  const float* bias;  // as that of SiluMul
  int64_t size;
  float limit, alpha;

  void operator()(int64_t row, int64_t panel, const float* y) const {
    constexpr int64_t half = kPanel / 2;
    for (int64_t i = 0, column = panel * half; i < half; i += 16, column += 16) {
      const Lanes lanes = lanes_below(size, column);
      const Floats gate = at_most_limit(with_bias(y + i, bias, column, lanes));
      const Floats up = at_least_minus_limit(at_most_limit(with_bias(y + half + i, bias, size + column, lanes)));
      const Floats one_plus_exp = floats(1.0f) + exp16(floats(0.0f) - floats(alpha) * gate);
      store_lanes(out + row * size + column, lanes, gate / one_plus_exp * (up + floats(1.0f)));
    }
  }

 private:
  Floats at_most_limit(Floats x) const { return select(less(floats(limit), x), floats(limit), x); }
  Floats at_least_minus_limit(Floats x) const { return select(less(x, floats(-limit)), floats(-limit), x); }
};

}  // namespace baton
