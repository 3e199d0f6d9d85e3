#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "norm_rope.h"
#include "scratch.h"
#include "status.h"

namespace baton {
namespace {

class Decoder {
 public:
  Decoder(Team& team, const DecoderDesc& model, const KVPool& pool)
      : team_(team), model_(model), layers_(model.layers, model.layers + model.num_layers), pool_(pool) {}

  Status forward(const BatchDesc& batch);
  void logits(const float* hidden, int64_t num_rows, float* out);

 private:
  int64_t q_size() const { return model_.num_heads * model_.head_dim; }
  int64_t qkv_size() const { return (model_.num_heads + 2 * model_.num_kv_heads) * model_.head_dim; }
  KVPages pages_of(int64_t layer) const;
  bool read_inputs(const BatchDesc&);
  bool in_window_pool(const LayerDesc& layer) const { return pool_.window_pages != nullptr && layer.window > 0; }
  void place_tokens(const BatchDesc&);
  void list_wanted(const BatchDesc&);
  void keep_wanted(float*& residual, bf16*& attended);
  void attend(const BatchDesc&, const LayerDesc&, const KVPages&, const bf16* q, bf16* out);
  void mlp(const LayerDesc&, float* residual, int64_t num_rows);
  void experts(const LayerDesc&, float* residual, int64_t num_rows);
  void add(const Rows&, int64_t m, const PackedLinear&, const float* out_norm, float* residual);
  Codes codes_of(int64_t m, const PackedLinear&);
  const bf16* in_order(const bf16* x, int64_t m, const PackedLinear&);
  Rows normed(const float* residual, int64_t m, const float* weight, const PackedLinear& reader);
  Rows rows_of(const bf16* x, int64_t m, const PackedLinear& reader);

  Team& team_;
  const DecoderDesc model_;
  const std::vector<LayerDesc> layers_;
  const KVPool pool_;

  std::vector<int64_t> ids_, positions_, pages_, window_pages_, offsets_, wanted_;
  Scratch<float> residual_, wanted_residual_, branch_, rotary_;
  Scratch<bf16> normed_, wide_, q_, attended_, ordered_;
  CodesScratch codes_;
  Scratch<float> scores_;
  Experts experts_;
};

KVPages Decoder::pages_of(int64_t layer) const {
  KVPages kv{nullptr, nullptr, pool_.page_size, model_.num_kv_heads, model_.head_dim, pool_.has_codes != 0};
  const bool in_window_pool = this->in_window_pool(layers_[layer]);
  const int64_t nbytes = (in_window_pool ? pool_.num_window_pages : pool_.num_pages) * kv.page_nbytes();
  const int64_t number = std::count_if(layers_.begin(), layers_.begin() + layer, [&](const LayerDesc& before) {
    return this->in_window_pool(before) == in_window_pool;
  });
  kv.k = (in_window_pool ? pool_.window_pages : pool_.pages) + 2 * number * nbytes;
  kv.v = kv.k + nbytes;
  return kv;
}

// Collects the input tokens. False where one is outside the vocabulary.
bool Decoder::read_inputs(const BatchDesc& batch) {
  for (int64_t i = 0; i < batch.num_future_writes; i++)
    batch.last_tokens[batch.future_rows[i]] = batch.future_tokens[i];
  const int64_t num_extends = batch.num_sequences - batch.num_decodes;
  int64_t num_ids = 0;
  for (int64_t b = 0; b < num_extends; b++) num_ids += batch.lengths[b];
  ids_.assign(batch.input_ids, batch.input_ids + num_ids);
  for (int64_t b = num_extends; b < batch.num_sequences; b++) ids_.push_back(batch.last_tokens[batch.rows[b]]);
  return std::all_of(ids_.begin(), ids_.end(), [&](int64_t id) { return 0 <= id && id < model_.vocab_size; });
}

// Computes the position of each token in its sequence, and the place of its K and V in both pools.
void Decoder::place_tokens(const BatchDesc& batch) {
  positions_.clear();
  pages_.clear();
  window_pages_.clear();
  offsets_.clear();
  for (int64_t b = 0; b < batch.num_sequences; b++) {
    const int64_t row = b * batch.table_stride;
    for (int64_t i = batch.starts[b]; i < batch.starts[b] + batch.lengths[b]; i++) {
      positions_.push_back(i);
      pages_.push_back(batch.page_table[row + i / pool_.page_size]);
      if (pool_.window_pages != nullptr) window_pages_.push_back(batch.window_table[row + i / pool_.page_size]);
      offsets_.push_back(i % pool_.page_size);
    }
  }
}

// Collects the tokens that are needed after the last layer: those that sample, then hidden_rows.
void Decoder::list_wanted(const BatchDesc& batch) {
  wanted_.clear();
  int64_t b = 0, end = 0;
  for (int64_t i = 0; i < batch.num_sampled; i++) {
    for (; b <= batch.sampled[i]; b++) end += batch.lengths[b];
    wanted_.push_back(end - 1);
  }
  wanted_.insert(wanted_.end(), batch.hidden_rows, batch.hidden_rows + batch.num_hidden);
}

Status Decoder::forward(const BatchDesc& batch) {
  if (!read_inputs(batch)) return kUnknownToken;
  place_tokens(batch);
  list_wanted(batch);
  const int64_t num_tokens = ids_.size(), num_wanted = wanted_.size(), d = model_.hidden_size;
  float* residual = residual_.of(num_tokens * d);
  bf16* q = q_.of(std::max(num_tokens, num_wanted) * q_size());
  bf16* attended = attended_.of(num_tokens * q_size());
  const int64_t rotary_size = num_tokens * model_.head_dim;
  float* const rotaries = rotary_.of(model_.num_ropes * rotary_size);
  for (int64_t i = 0; i < model_.num_ropes; i++)
    rotary_cos_sin(team_, positions_.data(), num_tokens, model_.rotary_waves + i * model_.head_dim, model_.head_dim / 2,
                   rotaries + i * rotary_size);
  embed(team_, ids_.data(), num_tokens, model_.embed, d, model_.embed_scale, residual);

  for (int64_t i = 0; i < model_.num_layers; i++) {
    const LayerDesc& layer = layers_[i];
    const KVPages pages = pages_of(i);
    const bool is_last = i + 1 == model_.num_layers;
    bf16* qkv = wide_.of(num_tokens * qkv_size());
    linear(team_, normed(residual, num_tokens, layer.attention_norm, layer.qkv), num_tokens, layer.qkv, qkv);
    norm_rope_write(team_, qkv, num_tokens, model_.num_heads, {layer.qk_norm, model_.rms_norm_eps, layer.whole_qk != 0},
                    rotaries + layer.rope * rotary_size, pages,
                    in_window_pool(layer) ? window_pages_.data() : pages_.data(), offsets_.data(), q);
    int64_t num_rows = num_tokens;
    if (is_last && (num_rows = num_wanted) == 0) {
      __atomic_fetch_add(batch.progress, 1, __ATOMIC_RELAXED);
      break;  // a batch of chunks that end within their prompts only writes K and V
    }
    attend(batch, layer, pages, q, attended);
    if (is_last) keep_wanted(residual, attended);
    add(rows_of(attended, num_rows, layer.o), num_rows, layer.o, layer.attention_out_norm, residual);
    if (layer.experts) experts(layer, residual, num_rows);
    else mlp(layer, residual, num_rows);
    __atomic_fetch_add(batch.progress, 1, __ATOMIC_RELAXED);
  }
  if (batch.num_sampled > 0) logits(residual, batch.num_sampled, batch.logits);
  if (batch.num_hidden > 0) std::copy_n(residual + batch.num_sampled * d, batch.num_hidden * d, batch.hidden);
  return kDone;
}

// From here on only the rows that are needed are computed: other tokens only need a token's K and V.
void Decoder::keep_wanted(float*& residual, bf16*& attended) {
  const int64_t d = model_.hidden_size;
  float* rows = wanted_residual_.of(wanted_.size() * d);
  bf16* outputs = q_.of(wanted_.size() * q_size());
  team_.each(wanted_.size(), [&](int64_t i) {
    std::copy_n(residual + wanted_[i] * d, d, rows + i * d);
    std::copy_n(attended + wanted_[i] * q_size(), q_size(), outputs + i * q_size());
  });
  residual = rows;
  attended = outputs;
}

void Decoder::attend(const BatchDesc& batch, const LayerDesc& layer, const KVPages& pages, const bf16* q, bf16* out) {
  const QueryHeads heads{model_.num_heads, layer.window, layer.sinks};
  const int64_t num_extends = batch.num_sequences - batch.num_decodes;
  const int32_t* const table = in_window_pool(layer) ? batch.window_table : batch.page_table;
  const Sequences extends{num_extends, table, batch.table_stride, batch.starts, batch.lengths};
  const Sequences decodes{batch.num_decodes, table + num_extends * batch.table_stride, batch.table_stride,
                          batch.starts + num_extends, batch.lengths + num_extends};
  const int64_t first_decode = (int64_t(ids_.size()) - batch.num_decodes) * q_size();
  if (extends.num > 0) extend_attention(team_, q, pages, extends, heads, out);
  if (decodes.num > 0) decode_attention(team_, q + first_decode, pages, decodes, heads, out + first_decode);
}

void Decoder::mlp(const LayerDesc& layer, float* residual, int64_t num_rows) {
  bf16* product = wide_.of(num_rows * layer.down.k);
  const Rows x = normed(residual, num_rows, layer.mlp_norm, layer.gate_up);
  (layer.gelu ? linear_gelu_mul : linear_silu_mul)(team_, x, num_rows, layer.gate_up, product);
  add(rows_of(product, num_rows, layer.down), num_rows, layer.down, layer.mlp_out_norm, residual);
}

// residual += y, or its norm.
void Decoder::add(const Rows& x, int64_t m, const PackedLinear& w, const float* out_norm, float* residual) {
  if (out_norm == nullptr) return linear_add(team_, x, m, w, residual);
  float* const y = branch_.of(m * w.n);
  linear_float(team_, x, m, w, y);
  add_rms_norm(team_, y, m, w.n, out_norm, model_.rms_norm_eps, residual);
}

void Decoder::experts(const LayerDesc& layer, float* residual, int64_t num_rows) {
  const ExpertsDesc& experts = *layer.experts;
  const Rows x = normed(residual, num_rows, layer.mlp_norm, experts.router);
  float* const scores = scores_.of(num_rows * experts.num_experts);
  linear_float(team_, x, num_rows, experts.router, scores);
  experts_.add(team_, experts, x.values, scores, num_rows, residual);
}

void Decoder::logits(const float* hidden, int64_t num_rows, float* out) {
  linear_float(team_, normed(hidden, num_rows, model_.norm, model_.lm_head), num_rows, model_.lm_head, out);
}

// The codes of m rows for a weight. They are good until the next call.
Codes Decoder::codes_of(int64_t m, const PackedLinear& w) {
  return codes_.of(m, w.k, w.group, w.order);
}

// The norm of m rows, as `reader` reads them. Good until the next call.
Rows Decoder::normed(const float* residual, int64_t m, const float* weight, const PackedLinear& reader) {
  const auto norm = [&](const auto& out) {
    rms_norm(team_, residual, m, model_.hidden_size, weight, model_.rms_norm_eps, out);
  };
  Rows rows;
  if (reader.takes_codes()) norm(rows.codes = codes_of(m, reader));
  else {
    bf16* const values = normed_.of(m * model_.hidden_size);
    norm(values), rows.values = in_order(values, m, reader);
  }
  return rows;
}

// Rows x in the order of a weight. Good until the next call.
const bf16* Decoder::in_order(const bf16* x, int64_t m, const PackedLinear& w) {
  if (w.order == nullptr) return x;
  bf16* const rows = ordered_.of(m * w.k);
  team_.each(m, [&](int64_t row) {
    for (int64_t i = 0; i < w.k; i++) rows[row * w.k + i] = x[row * w.k + w.order[i]];
  });
  return rows;
}

// The rows x, as `reader` reads them. Good until the next call.
Rows Decoder::rows_of(const bf16* x, int64_t m, const PackedLinear& reader) {
  if (!reader.takes_codes()) return {in_order(x, m, reader)};
  const Codes codes = codes_of(m, reader);
  quantize(team_, x, m, codes);
  return {nullptr, codes};
}

}  // namespace
}  // namespace baton

// Null where there is no memory for a decoder.
extern "C" void* baton_decoder_new(void* team, const baton::DecoderDesc* model, const baton::KVPool* pool) {
  try {
    return new baton::Decoder(*static_cast<baton::Team*>(team), *model, *pool);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

extern "C" void baton_decoder_free(void* decoder) { delete static_cast<baton::Decoder*>(decoder); }

// Returns a Status. After an error the KV of this batch is undefined, and nothing else has changed.
extern "C" int64_t baton_decoder_forward(void* decoder, const baton::BatchDesc* batch) {
  return baton::status_of([&] { return static_cast<baton::Decoder*>(decoder)->forward(*batch); });
}

// Computes the logits [num_rows][vocab_size] of rows of BatchDesc::hidden.
extern "C" int64_t baton_decoder_logits(void* decoder, const float* hidden, int64_t num_rows, float* out) {
  return baton::status_of([&] {
    static_cast<baton::Decoder*>(decoder)->logits(hidden, num_rows, out);
    return baton::kDone;
  });
}
