// Causal attention over the KV pages [num_pages][num_kv_heads] of one layer.
//
// A head of a page holds rows [page_size][head_dim], bf16 or codes of 8 bits. Behind codes come their scales
// [page_size], float32: element = code * scale. Both are made of what would be stored as bf16 (quantize.h).
//
// Decode and extend attention add in the same order (attention_keys.h, attention_state.h), so a token's result has the
// same bits from both. A layer may have a window and sinks (shared/kernels/reference.py).
#pragma once
#include <algorithm>

#include "threads.h"
#include "vec.h"

namespace baton {

struct KVPages {
  char* k;
  char* v;
  int64_t page_size, num_kv_heads, head_dim;  // head_dim: a multiple of 16, at most 256
  bool has_codes;

  int64_t row_nbytes() const { return has_codes ? head_dim : 2 * head_dim; }
  int64_t rows_nbytes() const { return page_size * row_nbytes(); }
  int64_t head_nbytes() const { return rows_nbytes() + (has_codes ? page_size * int64_t(sizeof(float)) : 0); }
  int64_t page_nbytes() const { return num_kv_heads * head_nbytes(); }
};

// The query heads of a layer, and what they see.
struct QueryHeads {
  int64_t num;
  int64_t window;      // a token sees its last `window` keys, itself among them; 0: all keys
  const float* sinks;  // [num], or null

  // The first key that the token at a position sees.
  int64_t first_key(int64_t position) const { return window ? std::max<int64_t>(position + 1 - window, 0) : 0; }
  const float* sink(int64_t head) const { return sinks ? sinks + head : nullptr; }
};

// The sequences b of a batch. page_table [b][table_stride] has the pages of each one in order.
struct Sequences {
  int64_t num;
  const int32_t* page_table;
  int64_t table_stride;
  const int64_t* starts;   // tokens that were computed before
  const int64_t* lengths;  // tokens of this forward, whose K and V are in their pages already
};

// One new token of each sequence: q, out [num][heads][head_dim].
void decode_attention(Team&, const bf16* q, const KVPages&, const Sequences&, const QueryHeads&, bf16* out);

// All new tokens of each sequence: q, out [sum of lengths][heads][head_dim].
void extend_attention(Team&, const bf16* q, const KVPages&, const Sequences&, const QueryHeads&, bf16* out);

}  // namespace baton
