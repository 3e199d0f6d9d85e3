// Decode attention: one new token of each sequence attends to all of its pages.
//
// A sequence is cut into splits of kSplit tokens and these into blocks, each with an online softmax in float32; splits
// are merged in their order. Neither cut depends on the batch or on the team, so a sequence's result does not either.
// Blocks are outside and heads inside: with pages [head][token][dim] that reads whole pages, a page after the other.
#include <vector>

#include "attention_rows.h"

namespace baton {
namespace {

constexpr int64_t kSplit = 512;
constexpr int64_t kBlock = 64;
constexpr int64_t kHeads = 4;  // query heads of one KV head that share the registers a row of V was loaded to

struct Call {
  const bf16* q;
  KVPages kv;
  Sequences sequences;
  int64_t num_heads;
  bf16* out;

  int64_t group() const { return num_heads / kv.num_kv_heads; }
  int64_t context(int64_t b) const { return sequences.starts[b] + sequences.lengths[b]; }
  const int32_t* pages(int64_t b) const { return sequences.page_table + b * sequences.table_stride; }
  int64_t head_offset(int64_t kv_head) const { return kv_head * kv.page_size * kv.head_dim; }
  int64_t sums_size() const { return 32 * num_chunks(kv.head_dim); }
};

// What one head has seen of one split: sums of p * v (a chunk's two registers side by side), of p, and the maximum.
struct Partial {
  float* sums;
  float* total;
  float* maximum;
};

struct Partials {
  explicit Partials(const Call& call, int64_t num_splits)
      : num_heads(call.num_heads), stride(call.sums_size() + 16), floats(num_splits * num_heads * stride) {}
  Partial at(int64_t split, int64_t head) const {
    float* first = floats.data + (split * num_heads + head) * stride;
    return {first, first + stride - 16, first + stride - 15};
  }

  int64_t num_heads, stride;
  Scratch<float> floats;
};

struct Block {
  int64_t rows[kBlock];  // as find_rows; filled up to a multiple of 16 with the last
  int64_t count = 0;

  void fill(const Call& call, int64_t b, int64_t first, int64_t end) {
    count = std::clamp<int64_t>(end - first, 0, kBlock);
    if (count == 0) return;
    find_rows(call.kv, call.pages(b), first, count, rows);
    std::fill(rows + count, rows + (count + 15) / 16 * 16, rows[count - 1]);
  }
};

// The rows read after these: by the time their turn comes they are in the L2 cache.
struct Ahead {
  const bf16 *k, *v;
  const int64_t* rows;
  int64_t count;

  void fetch(const bf16* values, int64_t i, int64_t head_dim) const {
    if (i >= count) return;
    for (int64_t d = 0; d < head_dim; d += 32) _mm_prefetch(reinterpret_cast<const char*>(values + rows[i] + d), _MM_HINT_T1);
  }
};

// Lane i of the result is the sum of the lanes of sums[i].
inline __m512 sum_lanes(const __m512 (&sums)[16]) {
  __m512 fours[4];
  for (int i = 0; i < 4; i++) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(sums[4 * i], sums[4 * i + 1]), _mm512_unpackhi_ps(sums[4 * i], sums[4 * i + 1]));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(sums[4 * i + 2], sums[4 * i + 3]), _mm512_unpackhi_ps(sums[4 * i + 2], sums[4 * i + 3]));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  }
  auto halve = [](__m512 a, __m512 b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); };
  return halve(halve(fours[0], fours[1]), halve(fours[2], fours[3]));
}

// HeadDim is known to the compiler, or 0: then `head_dim` says it.
template <int HeadDim>
struct Kernel {
  const Call& call;

  int64_t head_dim() const { return HeadDim ? HeadDim : call.kv.head_dim; }
  int64_t chunks() const { return num_chunks(head_dim()); }

  // q . k of 16 rows.
  __m512 scores(const bf16* q, const bf16* k, const int64_t* rows, const Ahead& ahead, int64_t first_ahead) const {
    __m512 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      const bf16* row = k + rows[i];
      sums[i] = _mm512_setzero_ps();
#pragma GCC unroll 8
      for (int64_t c = 0; c < chunks(); c++)
        sums[i] = dot_pairs(sums[i], load_chunk(q, c, head_dim()), load_chunk(row, c, head_dim()));
      ahead.fetch(ahead.k, first_ahead + i, head_dim());
    }
    return sum_lanes(sums);
  }

  // The weights of a block's rows as bf16 (zeros behind the last), and by how much what was summed before shrinks.
  float softmax(const __m512* scores, int64_t count, Partial partial, bf16* weights) const {
    const __m512 scale = _mm512_set1_ps(score_scale(head_dim()));
    __m512 highest = _mm512_set1_ps(kNoScore);
    for (int64_t i = 0; i < count; i += 16)
      highest = _mm512_mask_max_ps(highest, lanes_before(count - i), highest, _mm512_mul_ps(scores[i / 16], scale));
    const float maximum = std::max(*partial.maximum, _mm512_reduce_max_ps(highest));
    const float shrink = exp2_one(*partial.maximum - maximum);
    __m512 total = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16) {
      const __m512 power = exp2_16(_mm512_fmsub_ps(scores[i / 16], scale, _mm512_set1_ps(maximum)));
      const __m512 weight = _mm512_maskz_mov_ps(lanes_before(count - i), power);
      total = _mm512_add_ps(total, weight);
      store16(weights + i, weight);
    }
    *partial.total = *partial.total * shrink + _mm512_reduce_add_ps(total);
    *partial.maximum = maximum;
    return shrink;
  }

  // sums = sums * shrink + weights * v for chunks [c, c + Chunks) of Heads heads.
  template <int Heads, int Chunks>
  void add_values(int64_t c, const bf16 (*weights)[kBlock], const float* shrink, const bf16* v, const Block& block, const Partial* partials,
                  const Ahead* ahead) const {
    __m512 sums[Heads][2 * Chunks];
    for (int h = 0; h < Heads; h++)
      for (int i = 0; i < 2 * Chunks; i++)
        sums[h][i] = _mm512_mul_ps(_mm512_load_ps(partials[h].sums + 32 * c + 16 * i), _mm512_set1_ps(shrink[h]));
    for (int64_t t = 0; t < block.count; t += 2) {
      const bf16 *even = v + block.rows[t], *odd = v + block.rows[t + 1];
      if (ahead) {
        ahead->fetch(ahead->v, t, head_dim());
        ahead->fetch(ahead->v, t + 1, head_dim());
      }
      __m512i pairs[2 * Chunks];
#pragma GCC unroll 8
      for (int i = 0; i < Chunks; i++) {
        const __m512i a = load_chunk(even, c + i, head_dim()), b = load_chunk(odd, c + i, head_dim());
        pairs[2 * i] = interleave_low(a, b);
        pairs[2 * i + 1] = interleave_high(a, b);
      }
#pragma GCC unroll 4
      for (int h = 0; h < Heads; h++) {
        int32_t pair;
        std::memcpy(&pair, weights[h] + t, 4);
        const __m512i weight = _mm512_set1_epi32(pair);
#pragma GCC unroll 8
        for (int i = 0; i < 2 * Chunks; i++) sums[h][i] = dot_pairs(sums[h][i], weight, pairs[i]);
      }
    }
    for (int h = 0; h < Heads; h++)
      for (int i = 0; i < 2 * Chunks; i++) _mm512_store_ps(partials[h].sums + 32 * c + 16 * i, sums[h][i]);
  }

  // One block of tokens for Heads query heads of a KV head.
  template <int Heads>
  void attend(const bf16* q, const bf16* k, const bf16* v, const Block& block, const Partial* partials, const Ahead& ahead) const {
    __m512 scores_of[Heads][kBlock / 16];
    for (int64_t t = 0; t < block.count; t += 16)
      for (int h = 0; h < Heads; h++)
        scores_of[h][t / 16] = scores(q + h * head_dim(), k, block.rows + t, ahead, h == 0 ? t : kBlock);
    alignas(64) bf16 weights[Heads][kBlock];
    float shrink[Heads];
    for (int h = 0; h < Heads; h++) shrink[h] = softmax(scores_of[h], block.count, partials[h], weights[h]);
    constexpr int kChunks = Heads <= 2 ? 4 : 2;
    int64_t c = 0;
    for (; c + kChunks <= chunks(); c += kChunks)
      add_values<Heads, kChunks>(c, weights, shrink, v, block, partials, c == 0 ? &ahead : nullptr);
    for (; c < chunks(); c++)
      add_values<Heads, 1>(c, weights, shrink, v, block, partials, c == 0 ? &ahead : nullptr);
  }

  void attend_group(int64_t num_heads, const bf16* q, const bf16* k, const bf16* v, const Block& block, const Partial* partials, const Ahead& ahead) const {
    switch (num_heads) {
      case 1: return attend<1>(q, k, v, block, partials, ahead);
      case 2: return attend<2>(q, k, v, block, partials, ahead);
      case 3: return attend<3>(q, k, v, block, partials, ahead);
      default: return attend<4>(q, k, v, block, partials, ahead);
    }
  }

  // Tokens [first, end) of sequence b for KV heads [first_head, end_head).
  void attend_split(const Partials& partials, int64_t split, int64_t b, int64_t first, int64_t end, int64_t first_head, int64_t end_head) const {
    const int64_t group = call.group();
    for (int64_t h = first_head * group; h < end_head * group; h++) {
      const Partial p = partials.at(split, h);
      std::fill(p.sums, p.sums + call.sums_size(), 0.0f);
      *p.total = 0.0f, *p.maximum = kNoScore;
    }
    Block blocks[2];
    blocks[0].fill(call, b, first, end);
    for (int64_t n = 0; first < end; first += kBlock, n++) {
      const Block& block = blocks[n % 2];
      Block& next = blocks[(n + 1) % 2];
      next.fill(call, b, first + kBlock, end);
      for (int64_t kv_head = first_head; kv_head < end_head; kv_head++) {
        const bool last = kv_head + 1 == end_head;
        const Block& then = last ? next : block;
        const int64_t here = call.head_offset(kv_head), there = call.head_offset(last ? first_head : kv_head + 1);
        const Ahead ahead{call.kv.k + there, call.kv.v + there, then.rows, then.count}, nothing{nullptr, nullptr, nullptr, 0};
        for (int64_t g = 0; g < group; g += kHeads) {
          const int64_t head = kv_head * group + g, heads = std::min(kHeads, group - g);
          Partial mine[kHeads];
          for (int64_t i = 0; i < heads; i++) mine[i] = partials.at(split, head + i);
          attend_group(heads, call.q + (b * call.num_heads + head) * head_dim(), call.kv.k + here, call.kv.v + here, block, mine,
                       g == 0 ? ahead : nothing);
        }
      }
    }
  }

  // The result of a head from its splits, which it overwrites.
  void finish(const Partials& partials, int64_t first_split, int64_t num_splits, int64_t b, int64_t head) const {
    const Partial whole = partials.at(first_split, head);
    for (int64_t split = 1; split < num_splits; split++) {
      const Partial part = partials.at(first_split + split, head);
      const float maximum = std::max(*whole.maximum, *part.maximum);
      const float before = exp2_one(*whole.maximum - maximum), now = exp2_one(*part.maximum - maximum);
      for (int64_t d = 0; d < 32 * chunks(); d += 16) {
        const __m512 sum = _mm512_mul_ps(_mm512_load_ps(whole.sums + d), _mm512_set1_ps(before));
        _mm512_store_ps(whole.sums + d, _mm512_fmadd_ps(_mm512_load_ps(part.sums + d), _mm512_set1_ps(now), sum));
      }
      *whole.total = *whole.total * before + *part.total * now;
      *whole.maximum = maximum;
    }
    bf16* row = call.out + (b * call.num_heads + head) * head_dim();
    for (int64_t c = 0; c < chunks(); c++)
      store_chunk(row, c, head_dim(), _mm512_load_ps(whole.sums + 32 * c), _mm512_load_ps(whole.sums + 32 * c + 16), _mm512_set1_ps(1.0f / *whole.total));
  }
};

struct Split {
  int64_t b, first, end;
};

template <int HeadDim>
void attend(Team& team, const Call& call) {
  std::vector<Split> splits;
  std::vector<int64_t> first_split;
  for (int64_t b = 0; b < call.sequences.num; b++) {
    first_split.push_back(int64_t(splits.size()));
    for (int64_t first = 0; first < call.context(b); first += kSplit)
      splits.push_back({b, first, std::min(first + kSplit, call.context(b))});
  }
  first_split.push_back(int64_t(splits.size()));
  const Kernel<HeadDim> kernel{call};
  const Partials partials(call, int64_t(splits.size()));

  // Heads do not meet, so few splits are shared out by head as well.
  const int64_t kv_heads = call.kv.num_kv_heads, num_splits = int64_t(splits.size());
  const int64_t wanted = team.size() == 1 ? 1 : 4 * team.size();
  const int64_t shares = std::min(kv_heads, (wanted + num_splits - 1) / std::max<int64_t>(num_splits, 1));
  team.each(num_splits * shares, [&](int64_t task) {
    const int64_t split = task / shares, share = task % shares;
    const auto [b, first, end] = splits[split];
    const int64_t first_head = share * kv_heads / shares, end_head = (share + 1) * kv_heads / shares;
    kernel.attend_split(partials, split, b, first, end, first_head, end_head);
    if (first_split[b + 1] - first_split[b] > 1) return;
    for (int64_t head = first_head * call.group(); head < end_head * call.group(); head++) kernel.finish(partials, split, 1, b, head);
  });
  std::vector<int64_t> in_splits;
  for (int64_t b = 0; b < call.sequences.num; b++)
    if (first_split[b + 1] - first_split[b] > 1) in_splits.push_back(b);
  team.each(int64_t(in_splits.size()), [&](int64_t i) {
    const int64_t b = in_splits[i];
    for (int64_t head = 0; head < call.num_heads; head++) kernel.finish(partials, first_split[b], first_split[b + 1] - first_split[b], b, head);
  });
}

}  // namespace

void decode_attention(Team& team, const bf16* q, const KVPages& kv, const Sequences& sequences, int64_t num_heads, bf16* out) {
  const Call call{q, kv, sequences, num_heads, out};
  switch (kv.head_dim) {
    case 64: return attend<64>(team, call);
    case 96: return attend<96>(team, call);
    case 128: return attend<128>(team, call);
    default: return attend<0>(team, call);
  }
}

}  // namespace baton

extern "C" void baton_decode_attention(void* team, const uint16_t* q, uint16_t* k_pages, uint16_t* v_pages, int64_t page_size,
                                       int64_t num_kv_heads, int64_t head_dim, int64_t num_sequences, const int32_t* page_table,
                                       int64_t table_stride, const int64_t* starts, const int64_t* lengths, int64_t num_heads,
                                       uint16_t* out) {
  baton::decode_attention(*static_cast<baton::Team*>(team), q, {k_pages, v_pages, page_size, num_kv_heads, head_dim},
                          {num_sequences, page_table, table_stride, starts, lengths}, num_heads, out);
}
