// Samples the next token of each row of logits.
#pragma once
#include <cstdint>

#include "threads.h"

namespace baton {

// Host arrays with one entry per row. If `temperatures` is null, every row takes its likeliest token.
struct Sampling {
  const float* temperatures;  // 0: the likeliest token
  const int64_t* top_ks;      // 0: no limit
  const float* top_ps;
  const float* min_ps;
  const double* uniforms;  // in [0, 1)
};

// A row of logits [num_rows][vocab_size] that draws is overwritten. The results are token_ids [num_rows].
void sample(Team&, float* logits, int64_t num_rows, int64_t vocab_size, const Sampling&, int64_t* token_ids);

}  // namespace baton
