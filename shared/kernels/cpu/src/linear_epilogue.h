// Stores one row of a panel: 64 float32 sums y of row `row`, for columns from 64 * panel on. Columns past n are left
// out.
#pragma once
#include "linear.h"

namespace baton {

inline __m512 with_bias(const float* y, const float* bias, int64_t column, __mmask16 lanes) {
  const __m512 sum = _mm512_loadu_ps(y);
  return bias ? _mm512_add_ps(sum, load_lanes(bias + column, lanes)) : sum;
}

template <class Out>
struct Store {
  Out* out;
  const float* bias;
  int64_t n;

  void operator()(int64_t row, int64_t panel, const float* y) const {
    for (int64_t i = 0, column = panel * kPanel; i < kPanel; i += 16, column += 16) {
      const __mmask16 lanes = lanes_below(n, column);
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
      const __mmask16 lanes = lanes_below(n, column);
      float* place = residual + row * n + column;
      const __m512 sum = with_bias(y + i, bias, column, lanes);
      store_lanes(place, lanes, _mm512_add_ps(load_lanes(place, lanes), sum));
    }
  }
};

struct SiluMul {
  bf16* out;
  const float* bias;  // [2 * size]: the gate's, then the up projection's
  int64_t size;       // columns of gate, of up and of out

  void operator()(int64_t row, int64_t panel, const float* y) const {
    constexpr int64_t half = kPanel / 2;
    for (int64_t i = 0, column = panel * half; i < half; i += 16, column += 16) {
      const __mmask16 lanes = lanes_below(size, column);
      const __m512 gate = with_bias(y + i, bias, column, lanes);
      const __m512 up = with_bias(y + half + i, bias, size + column, lanes);
      const __m512 one_plus_exp = _mm512_add_ps(_mm512_set1_ps(1.0f), exp16(_mm512_sub_ps(_mm512_setzero_ps(), gate)));
      store_lanes(out + row * size + column, lanes, _mm512_mul_ps(_mm512_div_ps(gate, one_plus_exp), up));
    }
  }
};

}  // namespace baton
