// Decode attention: one new token of each sequence attends to all of its pages.
//
// A sequence is divided into splits of kSplit tokens, and each split into blocks. A split has an online softmax in
// float32 over its blocks. Splits are merged in their order. The division does not depend on the batch or on the
// team, so the result of a sequence does not either. The outer loop is over blocks and the inner one over heads: with
// pages [head][token][dim] that reads whole pages, one after the other.
#include <type_traits>

#include "decode_blocks.h"
#include "decode_lanes.h"

namespace baton::decode {
namespace {

// The state of the heads of a unit in one split: the sums of p * v by head (the two registers of a chunk side by
// side), and the sums of p and the maxima in the lanes of the scores. A maximum is the same in all lanes of a head.
struct Partial {
  float* sums;
  float* totals;
  float* maxima;
};

struct Partials {
  explicit Partials(const Call& call, int64_t num_splits)
      : num_heads(call.num_heads), stride(call.sums_size() + 32), floats(num_splits * num_heads * stride) {}
  Partial at(int64_t split, int64_t first_head, int64_t heads) const {
    float* first = floats.data + (split * num_heads + first_head) * stride;
    float* last = first + heads * (stride - 32);
    return {first, last, last + 16};
  }

  int64_t num_heads, stride;
  Scratch<float> floats;
};

// Calls f(first, number) for the query heads of KV head `kv_head`, for each group that is computed at once.
template <class F>
inline void each_unit(const Call& call, int64_t kv_head, F&& f) {
  const int64_t end = (kv_head + 1) * call.group;
  for (int64_t head = kv_head * call.group, num; head < end; head += num) {
    num = heads_at_once(end - head);
    if (num == 4) f(head, std::integral_constant<int, 4>());
    else if (num == 2) f(head, std::integral_constant<int, 2>());
    else f(head, std::integral_constant<int, 1>());
  }
}

// A worker's weights of the tokens of its block by head, and the factor by which earlier sums shrink.
struct Weights {
  bf16* weights;
  float* shrinks;

  bf16* of(int64_t head) const { return weights + head * kBlock; }
  float* shrink(int64_t head) const { return shrinks + head * 16; }
};

// HeadDim is head_dim as a constant, or 0: then `head_dim` is used.
template <int HeadDim>
struct Kernel {
  const Call& call;

  int64_t head_dim() const { return HeadDim ? HeadDim : call.kv.head_dim; }
  int64_t chunks() const { return num_chunks(head_dim()); }

  // Part j of a row for each of Heads heads: of 32 dims for one, of 16 for two, of 8 for four.
  template <int Heads>
  __m512i load_part(const bf16* row, int64_t j) const {
    if constexpr (Heads == 1) return load_chunk(row, j, head_dim());
    if constexpr (Heads == 2) return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(row + 16 * j)));
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(row + 8 * j)));
  }
  template <int Heads>
  int64_t num_parts() const {
    return Heads == 1 ? chunks() : head_dim() * Heads / 32;
  }

  // Part j of the queries of Heads heads, [head][dim].
  template <int Heads>
  __m512i load_query(const bf16* q, int64_t j) const {
    if constexpr (Heads == 1) return load_chunk(q, j, head_dim());
    __m512i part = _mm512_setzero_si512();
    for (int h = 0; h < Heads; h++)
      part = _mm512_mask_mov_epi64(part, __mmask8((Heads == 2 ? 0xf : 0x3) << (8 / Heads * h)),
                                   load_part<Heads>(q + h * head_dim(), j));
    return part;
  }

  // The scores of a block's tokens with Heads heads.
  template <int Heads>
  void score(const Block& block, int64_t head, const bf16* k, const Ahead& ahead, __m512* scores) const {
    constexpr int kTokens = 16 / Heads;
    const bf16* q = call.q + (block.task->b * call.num_heads + head) * head_dim();
    __m512i query[32];
    for (int64_t j = 0; j < num_parts<Heads>(); j++) query[j] = load_query<Heads>(q, j);
    for (int64_t t = 0; t < block.count; t += kTokens) {
      __m512 sums[kTokens];
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; i++) {
        const bf16* row = k + block.rows[t + i];
        sums[i] = _mm512_setzero_ps();
        for (int64_t j = 0; j < num_parts<Heads>(); j++)
          sums[i] = dot_pairs(sums[i], query[j], load_part<Heads>(row, j));
        ahead.fetch(t + i, head_dim());
      }
      scores[t / kTokens] = sum_parts<Heads>(sums);
    }
  }

  // Weights as bf16 (zeros behind the last token), and the factor by which earlier sums shrink.
  template <int Heads>
  void weigh(const Block& block, const __m512* scores, const Partial& partial, bf16* weights, float* shrinks) const {
    constexpr int kTokens = 16 / Heads;
    if (block.is_first) {
      std::fill(partial.sums, partial.sums + Heads * call.sums_size(), 0.0f);
      _mm512_store_ps(partial.totals, _mm512_setzero_ps());
      _mm512_store_ps(partial.maxima, _mm512_set1_ps(kNoScore));
    }
    const __m512 scale = _mm512_set1_ps(score_scale(head_dim())), before = _mm512_load_ps(partial.maxima);
    const __m512i token = token_of_lane<Heads>();
    auto is_there = [&](int64_t t) {
      return _mm512_cmplt_epi32_mask(token, _mm512_set1_epi32(int(block.count - t)));
    };
    __m512 highest = _mm512_set1_ps(kNoScore);
    for (int64_t t = 0; t < block.count; t += kTokens)
      highest = _mm512_mask_max_ps(highest, is_there(t), highest, _mm512_mul_ps(scores[t / kTokens], scale));
    const __m512 maxima = _mm512_max_ps(before, max_of_heads<Heads>(highest));
    const __m512 shrink = exp2_16(_mm512_sub_ps(before, maxima));
    __m512 totals = _mm512_mul_ps(_mm512_load_ps(partial.totals), shrink);
    for (int64_t t = 0; t < block.count; t += kTokens) {
      const __m512 power = exp2_16(_mm512_fmsub_ps(scores[t / kTokens], scale, maxima));
      const __m512 weight = _mm512_maskz_mov_ps(is_there(t), power);
      totals = _mm512_add_ps(totals, weight);
      store16(weights + t * Heads, weight);
    }
    _mm512_store_ps(shrinks, shrink);
    _mm512_store_ps(partial.totals, totals);
    _mm512_store_ps(partial.maxima, maxima);
  }

  // sums = sums * shrink + weights * v for chunks [c, c + Chunks) of Heads heads.
  template <int Heads, int Chunks>
  void add_chunks(int64_t c, const Block& block, const bf16* v, const bf16* weights, const float* shrinks,
                  float* partial, const Ahead& ahead) const {
    __m512 sums[Heads][2 * Chunks];
    float* first[Heads];
    for (int h = 0; h < Heads; h++) {
      first[h] = partial + h * call.sums_size() + 32 * c;
      for (int i = 0; i < 2 * Chunks; i++)
        sums[h][i] = _mm512_mul_ps(_mm512_load_ps(first[h] + 16 * i), _mm512_set1_ps(shrinks[4 * h]));
    }
    for (int64_t t = 0; t < block.count; t += 2) {
      const bf16 *even = v + block.rows[t], *odd = v + block.rows[t + 1];
      ahead.fetch(t, head_dim()), ahead.fetch(t + 1, head_dim());
      __m512i pairs[2 * Chunks];
#pragma GCC unroll 8
      for (int i = 0; i < Chunks; i++) {
        const __m512i a = load_chunk(even, c + i, head_dim()), b = load_chunk(odd, c + i, head_dim());
        pairs[2 * i] = interleave_low(a, b);
        pairs[2 * i + 1] = interleave_high(a, b);
      }
      const bf16* of_pair = weights + t / 4 * 4 * Heads + t % 4;
#pragma GCC unroll 4
      for (int h = 0; h < Heads; h++) {
        int32_t pair;
        std::memcpy(&pair, of_pair + 4 * h, 4);
        const __m512i weight = _mm512_set1_epi32(pair);
#pragma GCC unroll 8
        for (int i = 0; i < 2 * Chunks; i++) sums[h][i] = dot_pairs(sums[h][i], weight, pairs[i]);
      }
    }
    for (int h = 0; h < Heads; h++)
      for (int i = 0; i < 2 * Chunks; i++) _mm512_store_ps(first[h] + 16 * i, sums[h][i]);
  }

  template <int Heads>
  void add(const Block& block, const bf16* v, const bf16* weights, const float* shrinks, float* sums,
           Ahead ahead) const {
    constexpr int kChunks = Heads <= 2 ? 4 : 2;
    int64_t c = 0;
    auto add_next = [&](auto chunks) {
      add_chunks<Heads, chunks>(c, block, v, weights, shrinks, sums, ahead);
      c += chunks, ahead = Ahead();
    };
    while (c + kChunks <= chunks()) add_next(std::integral_constant<int, kChunks>());
    if (kChunks > 2 && c + 2 <= chunks()) add_next(std::integral_constant<int, 2>());
    while (c < chunks()) add_next(std::integral_constant<int, 1>());
  }

  // K of all heads of a block, then V of all heads. A head's rows are prefetched while earlier ones are read.
  void work_off(Blocks& blocks, const Partials& partials, const Weights& weights,
                const std::vector<int64_t>& num_splits) const {
    __m512 scores[4 * kBlock / 16];
    for (;;) {
      const Block& block = blocks.next();
      if (!block.task) return;
      const Task& task = *block.task;
      Ahead ahead;
      for (int64_t kv_head = task.first_head; kv_head < task.end_head; kv_head++) {
        ahead = kv_head + 1 < task.end_head ? Ahead(call.k(kv_head + 1), block) : Ahead(call.v(task.first_head), block);
        each_unit(call, kv_head, [&](int64_t head, auto heads) {
          score<heads>(block, head, call.k(kv_head), ahead, scores);
          weigh<heads>(block, scores, partials.at(task.split, head, heads), weights.of(head), weights.shrink(head));
          ahead = Ahead();
        });
      }
      for (int64_t kv_head = task.first_head; kv_head < task.end_head; kv_head++) {
        const Block& next = blocks.ahead();
        ahead = kv_head + 1 < task.end_head ? Ahead(call.v(kv_head + 1), block)
                : next.task                 ? Ahead(call.k(next.task->first_head), next)
                                            : Ahead();
        each_unit(call, kv_head, [&](int64_t head, auto heads) {
          float* sums = partials.at(task.split, head, heads).sums;
          add<heads>(block, call.v(kv_head), weights.of(head), weights.shrink(head), sums, ahead);
          ahead = Ahead();
          if (block.is_last && num_splits[task.b] == 1) finish(partials, task.split, 1, task.b, head, heads);
        });
      }
    }
  }

  // Merges the splits of a unit's heads into the result. It overwrites the splits.
  void finish(const Partials& partials, int64_t first_split, int64_t num_splits, int64_t b, int64_t head,
              int64_t num_heads) const {
    const Partial whole = partials.at(first_split, head, num_heads);
    for (int64_t split = 1; split < num_splits; split++)
      merge(whole, partials.at(first_split + split, head, num_heads), num_heads);
    for (int64_t h = 0; h < num_heads; h++) {
      float total = 0;
      for (int64_t lane = 4 * h; lane < 16; lane += 4 * num_heads)
        for (int64_t i = lane; i < lane + 4; i++) total += whole.totals[i];
      bf16* row = call.out + (b * call.num_heads + head + h) * head_dim();
      const float* sums = whole.sums + h * call.sums_size();
      for (int64_t c = 0; c < chunks(); c++)
        store_chunk(row, c, head_dim(), _mm512_load_ps(sums + 32 * c), _mm512_load_ps(sums + 32 * c + 16),
                    _mm512_set1_ps(1.0f / total));
    }
  }

  void merge(const Partial& whole, const Partial& part, int64_t num_heads) const {
    const __m512 before = _mm512_load_ps(whole.maxima), now = _mm512_load_ps(part.maxima);
    const __m512 maxima = _mm512_max_ps(before, now);
    alignas(64) float keep[16], take[16];
    _mm512_store_ps(keep, exp2_16(_mm512_sub_ps(before, maxima)));
    _mm512_store_ps(take, exp2_16(_mm512_sub_ps(now, maxima)));
    auto blend = [](float* to, const float* from, __m512 a, __m512 b) {
      _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(from), b, _mm512_mul_ps(_mm512_load_ps(to), a)));
    };
    for (int64_t h = 0; h < num_heads; h++)
      for (int64_t d = h * call.sums_size(); d < (h + 1) * call.sums_size(); d += 16)
        blend(whole.sums + d, part.sums + d, _mm512_set1_ps(keep[4 * h]), _mm512_set1_ps(take[4 * h]));
    blend(whole.totals, part.totals, _mm512_load_ps(keep), _mm512_load_ps(take));
    _mm512_store_ps(whole.maxima, maxima);
  }
};

template <int HeadDim>
void attend(Team& team, const Call& call) {
  const int64_t batch = call.sequences.num, kv_heads = call.kv.num_kv_heads;
  std::vector<int64_t> num_splits, first_split;
  int64_t total_splits = 0;
  for (int64_t b = 0; b < batch; b++) {
    first_split.push_back(total_splits);
    num_splits.push_back((call.context(b) + kSplit - 1) / kSplit);
    total_splits += num_splits[b];
  }

  // Heads are independent, so where there are few splits their heads are separate tasks.
  const int64_t wanted = team.size() == 1 ? 1 : 4 * team.size();
  const int64_t shares = std::min(kv_heads, (wanted + total_splits - 1) / std::max<int64_t>(total_splits, 1));
  std::vector<Task> tasks;
  for (int64_t b = 0; b < batch; b++)
    for (int64_t i = 0; i < num_splits[b]; i++)
      for (int64_t share = 0; share < shares; share++)
        tasks.push_back({b, first_split[b] + i, i * kSplit, std::min((i + 1) * kSplit, call.context(b)),
                         share * kv_heads / shares, (share + 1) * kv_heads / shares});

  const Kernel<HeadDim> kernel{call};
  const Partials partials(call, total_splits);
  const Scratch<bf16> weights(team.size() * call.num_heads * kBlock);
  const Scratch<float> shrinks(team.size() * call.num_heads * 16);
  std::atomic<size_t> next_task{0};
  team.run([&](int worker) {
    const int64_t first = worker * call.num_heads;
    Blocks blocks(call, tasks, next_task);
    kernel.work_off(blocks, partials, {weights.data + first * kBlock, shrinks.data + first * 16}, num_splits);
  });
  std::vector<int64_t> to_merge;
  for (int64_t b = 0; b < batch; b++)
    if (num_splits[b] > 1) to_merge.push_back(b);
  team.each(int64_t(to_merge.size()), [&](int64_t i) {
    const int64_t b = to_merge[i];
    for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++)
      each_unit(call, kv_head, [&](int64_t head, auto heads) {
        kernel.finish(partials, first_split[b], num_splits[b], b, head, heads);
      });
  });
}

}  // namespace
}  // namespace baton::decode

namespace baton {

void decode_attention(Team& team, const bf16* q, const KVPages& kv, const Sequences& sequences, int64_t num_heads,
                      bf16* out) {
  const decode::Call call(q, kv, sequences, num_heads, out);
  switch (kv.head_dim) {
    case 64: return decode::attend<64>(team, call);
    case 96: return decode::attend<96>(team, call);
    case 128: return decode::attend<128>(team, call);
    default: return decode::attend<0>(team, call);
  }
}

}  // namespace baton

extern "C" void baton_decode_attention(void* team, const uint16_t* q, uint16_t* k_pages, uint16_t* v_pages,
                                       int64_t page_size, int64_t num_kv_heads, int64_t head_dim,
                                       int64_t num_sequences, const int32_t* page_table, int64_t table_stride,
                                       const int64_t* starts, const int64_t* lengths, int64_t num_heads,
                                       uint16_t* out) {
  const baton::KVPages kv{k_pages, v_pages, page_size, num_kv_heads, head_dim};
  const baton::Sequences sequences{num_sequences, page_table, table_stride, starts, lengths};
  baton::decode_attention(*static_cast<baton::Team*>(team), q, kv, sequences, num_heads, out);
}
