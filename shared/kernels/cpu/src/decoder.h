// A whole forward of a decoder in one call. Its layers are a list of records, as in shared/model/layer_records.py.
//
// The slow twin is shared/model/decoder.py. shared/kernels/cpu/decoder.py has the same structs, field by field.
#pragma once
#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "threads.h"
#include "vec.h"

namespace baton {

struct LayerDesc {
  const float* attention_norm;      // [hidden_size]
  const float* attention_out_norm;  // [hidden_size], or null
  const float* mlp_norm;            // [hidden_size]
  const float* mlp_out_norm;        // [hidden_size], or null
  const float* qk_norm;             // [num_heads + num_kv_heads][head_dim], or null
  const float* sinks;               // [num_heads], or null
  int64_t window;                   // keys that a token sees, itself among them; 0: all
  int64_t rope;                     // which of the rotary embeddings
  PackedLinear qkv, o;
  int64_t whole_qk;            // 1: qk_norm norms all heads of q as one row, and all of k
  PackedLinear gate_up, down;  // of a dense MLP
  int64_t gelu;                // 1: that has GELU in place of SiLU
  const ExpertsDesc* experts;  // null: the MLP is dense
};

struct DecoderDesc {
  int64_t vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim;
  float rms_norm_eps;
  float embed_scale;  // what multiplies embeddings
  int64_t num_ropes;
  const float* rotary_waves;  // [num_ropes][2][head_dim / 2]: radians per position, and what multiplies cosine and sine
  const bf16* embed;          // [vocab_size][hidden_size]
  const float* norm;          // [hidden_size]
  PackedLinear lm_head;
  const LayerDesc* layers;
};

// The KV pool: pages of K of layer 0, of V of layer 0, of K of layer 1, ... Layers with windows are in a pool of their
// own, unless `window_pages` is null. Layers are numbered by pool.
struct KVPool {
  char* pages;
  int64_t num_pages;
  char* window_pages;
  int64_t num_window_pages, page_size, has_codes;
};

// B sequences with T new tokens: extends first, then `num_decodes` decodes of one token each.
struct BatchDesc {
  int64_t num_sequences, num_decodes;
  const int64_t* rows;        // [B], rows of the FutureMap
  const int64_t* starts;      // [B]
  const int64_t* lengths;     // [B]
  const int32_t* page_table;    // [B][table_stride]
  const int32_t* window_table;  // the same of layers whose pages are KVPool::window_pages, if there are any
  int64_t table_stride;
  const int64_t* input_ids;  // of the extends, concatenated
  int64_t* last_tokens;      // the FutureMap, from which decodes read their token
  int64_t num_future_writes;
  const int64_t* future_rows;    // written to the FutureMap before anything is read
  const int64_t* future_tokens;  // [num_future_writes]
  int64_t num_sampled;
  const int64_t* sampled;  // [num_sampled], sequences that need the logits of their last token
  float* logits;           // [num_sampled][vocab_size]
  int64_t num_hidden;
  const int64_t* hidden_rows;  // [num_hidden], tokens that need their hidden state
  float* hidden;               // [num_hidden][hidden_size], before the final norm
  int64_t* progress;           // increases by one for each layer
};

}  // namespace baton
