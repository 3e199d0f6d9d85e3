// The sparse MLP of a layer: a router gives each token a score for every expert, and the token goes through the few
// experts with the largest. The slow twin is shared/model/experts.py.
//
// Tokens are grouped by expert, so an expert's panels are read once for all of its tokens, and those of other experts
// not at all. What a token gets is added up by ascending index of the expert, in float32.
// So a token's result does not depend on the batch or on the number of threads (ADR 27).
#pragma once
#include <vector>

#include "linear.h"
#include "scratch.h"

namespace baton {

// All experts have weights of the same sizes, bits and groups. They may have different orders of inputs.
struct ExpertsDesc {
  PackedLinear router;          // [num_experts][hidden_size], bf16
  const PackedLinear* gate_up;  // [num_experts], packed for linear_silu_mul
  const PackedLinear* down;     // [num_experts]
  int64_t num_experts, top_k;
  int64_t normalized;           // 1: the weights of a token's experts add up to 1
  float limit, alpha;           // of ClampedSiluMul (linear_epilogue.h). limit 0: SiluMul
};

// Keeps the memory that it needs from call to call.
class Experts {
 public:
  // residual [m][hidden_size] += the experts' weighted outputs for x [m][hidden_size]. `scores` [m][num_experts] are the
  // router's, and are overwritten.
  void add(Team&, const ExpertsDesc&, const bf16* x, float* scores, int64_t m, float* residual);

 private:
  struct Block {
    int64_t expert, begin, end;  // slots of one expert
  };
  struct RowsScratch {
    Scratch<bf16> values;
    CodesScratch codes;
  };

  void route(Team&, const ExpertsDesc&, float* scores, int64_t m);
  void group(const ExpertsDesc&, int64_t m);
  Rows inputs(Team&, const ExpertsDesc&, const bf16* x, int64_t m);
  void gate_up(Team&, const ExpertsDesc&, const Rows& x, bf16* product);
  void down(Team&, const ExpertsDesc&, const Rows& x, float* residual);
  bool have_orders(const PackedLinear* weights) const;
  Rows rows_of_slots(Team&, const bf16* x, const int64_t* rows, const PackedLinear* weights, RowsScratch&);

  // A slot is a token at one of its experts. Slots are ordered by expert, then by token.
  std::vector<int64_t> first_slots_, tokens_, experts_;
  std::vector<float> weights_;
  std::vector<Block> blocks_;
  Scratch<int32_t> chosen_;         // [m][top_k]
  Scratch<float> chosen_weights_;   // [m][top_k]
  CodesScratch token_codes_;
  RowsScratch inputs_, between_;
  Scratch<bf16> product_;
};

}  // namespace baton
