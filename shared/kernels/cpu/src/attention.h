// Causal attention over KV pages [num_pages][num_kv_heads][page_size][head_dim] of one layer.
//
// Decode and extend attention add in the same order (attention_keys.h, attention_state.h), so a token's result has the
// same bits from both.
#pragma once
#include "threads.h"
#include "vec.h"

namespace baton {

struct KVPages {
  bf16* k;
  bf16* v;
  int64_t page_size, num_kv_heads, head_dim;  // head_dim: a multiple of 16, at most 256
};

// The sequences b of a batch. page_table [b][table_stride] has the pages of each one in order.
struct Sequences {
  int64_t num;
  const int32_t* page_table;
  int64_t table_stride;
  const int64_t* starts;   // tokens that were computed before
  const int64_t* lengths;  // tokens of this forward, whose K and V are in their pages already
};

// One new token of each sequence: q, out [num][num_heads][head_dim].
void decode_attention(Team&, const bf16* q, const KVPages&, const Sequences&, int64_t num_heads, bf16* out);

// All new tokens of each sequence: q, out [sum of lengths][num_heads][head_dim].
void extend_attention(Team&, const bf16* q, const KVPages&, const Sequences&, int64_t num_heads, bf16* out);

}  // namespace baton
