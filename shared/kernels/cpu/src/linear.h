// y = x W^T with weights that were packed at load.
//
// A panel holds 64 output columns in units of 4 bytes: panels[n / 64][units of k][64], zero-padded to whole panels. A
// unit is a pair of bf16, four codes of 8 bits, or eight codes of 4 bits: those of the first four k in the lower halves
// of its bytes. A panel is read from memory once for all m rows. Its layout is that of vdpbf16ps and vpdpbusd (a unit
// per lane) and of an AMX tile (16 rows of 64 bytes).
//
// bf16 is multiplied by bf16, and products are added up in float32, over k in the same order for any m. Codes are
// multiplied by codes of x (quantize.h), and products are added up as integers, which is exact in any order. Groups of k
// with a scale of their own are added up in float32, in ascending order. So the result of a row does not depend on the
// batch. Where activations are to stay in 16 bits, codes become bf16 instead.
#pragma once
#include <algorithm>

#include "quantize.h"
#include "threads.h"
#include "vec.h"

namespace baton {

constexpr int64_t kPanel = 64;

// Bytes between what is read of a panel and what is prefetched, where one step reads it for all rows.
constexpr int64_t kAhead = 4096;

// Of `lines` of each unit of k that `steps` prefetch together, those that step number `step` does.
//
// A single step reads a panel in order. The prefetch of Xeons' hardware keeps too few lines on their way: with ours, up to
// 6 rows take 0.65 to 0.95 of the time. That of AMD's keeps enough and ours disturbs it: 3 to 6 rows take 1.2 to 1.5 times
// as long on Zen 4.
inline int64_t fetched_by(int64_t step, int64_t steps, int64_t lines) {
  if (steps == 1 && __builtin_cpu_is("amd")) return 0;
  const auto before = [&](int64_t count) { return (lines * count + steps - 1) / steps; };
  return before(step + 1) - before(step);
}

// A weight. A code stands for (code - zero) * scale; scales and zeros are [n / 64][k / group][64], as panels are. Codes of
// FP4 and their scales are described in code_kinds.h.
struct PackedLinear {
  const void* panels;
  const float* bias;  // [n], or null
  int64_t n, k;
  int64_t bits;          // 16: bf16. 8 and 4: codes, unsigned
  int64_t is_float;      // 1: codes of 4 bits are FP4
  int64_t group;         // k that share a scale. The fields from here on are those of codes
  const void* scales;    // float32; of FP4 uint8
  const uint8_t* zeros;  // null: all are 2^(bits - 1)
  const int32_t* order;  // [k], the column of x for each k. Null: k itself
  int64_t weight_only;   // 1: x stays bf16 (linear_weight_only.h). In each four codes the middle two are exchanged

  bool takes_codes() const { return bits < 16 && !weight_only; }
};

// Rows of x for a weight, in its order: bf16, or codes where it takes codes.
struct Rows {
  const bf16* values = nullptr;  // [m][k]
  Codes codes{};
};

void linear(Team&, const Rows&, int64_t m, const PackedLinear&, bf16* out);              // [m][n]
void linear_float(Team&, const Rows&, int64_t m, const PackedLinear&, float* out);       // [m][n], for logits
void linear_add(Team&, const Rows&, int64_t m, const PackedLinear&, float* residual);  // residual [m][n] += y

// out [m][n / 2] = silu(gate) * up. A panel holds 32 gate columns, then the same 32 columns of up.
void linear_silu_mul(Team&, const Rows&, int64_t m, const PackedLinear&, bf16* out);

// The same of gelu(gate), with GELU's approximation by tanh (arXiv 1606.08415).
void linear_gelu_mul(Team&, const Rows&, int64_t m, const PackedLinear&, bf16* out);

}  // namespace baton
