// y = x W^T over weights packed once at load. x is bf16 [m][k], products accumulate in float32.
//
// A panel holds 64 output columns: panels[n / 64][k / 2][64][2], zero-padded to whole panels. It streams once from
// memory for all m rows, is what vdpbf16ps takes (a pair of k per lane) and what an AMX tile is (16 rows of 64 bytes).
// Every output element sums over k in the same order for any m: a row's result does not depend on its batch.
#pragma once
#include "threads.h"
#include "vec.h"

namespace baton {

constexpr int64_t kPanel = 64;

struct PackedLinear {
  const bf16* panels;
  const float* bias;  // [n], or null
  int64_t n, k;
};

void linear(Team&, const bf16* x, int64_t m, const PackedLinear&, bf16* out);          // [m][n]
void linear_float(Team&, const bf16* x, int64_t m, const PackedLinear&, float* out);   // [m][n], for logits
void linear_add(Team&, const bf16* x, int64_t m, const PackedLinear&, float* residual);  // residual [m][n] += y

// A panel holds 32 gate columns, then their 32 up columns: out [m][n / 2] = silu(gate) * up.
void linear_silu_mul(Team&, const bf16* x, int64_t m, const PackedLinear&, bf16* out);

}  // namespace baton
