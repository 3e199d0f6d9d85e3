// y = x W^T with weights that were packed at load. x is bf16 [m][k]. Products are added up in float32.
//
// A panel holds 64 output columns: panels[n / 64][k / 2][64][2], zero-padded to whole panels. A panel is read from
// memory once for all m rows. Its layout is that of vdpbf16ps (a pair of k per lane) and of an AMX tile (16 rows of
// 64 bytes). Every output element is summed over k in the same order for any m, so the result of a row does not
// depend on the batch.
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

// out [m][n / 2] = silu(gate) * up. A panel holds 32 gate columns, then the same 32 columns of up.
void linear_silu_mul(Team&, const bf16* x, int64_t m, const PackedLinear&, bf16* out);

}  // namespace baton
