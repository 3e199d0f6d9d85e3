// Decode attention: one new token of each sequence attends to all of its pages.
//
// A sequence is cut into splits of kSplit tokens and these into blocks, each with an online softmax in float32; splits
// are merged in their order. Neither cut depends on the batch or on the team, so a sequence's result does not either.
// Blocks are outside and heads inside: with pages [head][token][dim] that reads whole pages, a page after the other.
#include <type_traits>

#include "decode_units.h"

namespace baton::decode {
namespace {

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

// A unit on its way from scores to weights to sums.
struct Stage {
  Unit unit;
  __m512 scores[kHeads][kBlock / 16];
  alignas(64) bf16 weights[kHeads][kBlock];
  float shrink[kHeads];
};

// Lane i of the result is the sum of the lanes of sums[i].
inline __m512 sum_lanes(const __m512 (&sums)[16]) {
  __m512 fours[4];
  for (int i = 0; i < 4; i++) {
    const __m512 a = sums[4 * i], b = sums[4 * i + 1], c = sums[4 * i + 2], d = sums[4 * i + 3];
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    fours[i] = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  }
  auto halve = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return halve(halve(fours[0], fours[1]), halve(fours[2], fours[3]));
}

// HeadDim is known to the compiler, or 0: then `head_dim` says it.
template <int HeadDim>
struct Kernel {
  const Call& call;

  int64_t head_dim() const { return HeadDim ? HeadDim : call.kv.head_dim; }
  int64_t chunks() const { return num_chunks(head_dim()); }

  // q . k of 16 rows.
  __m512 scores(const bf16* q, const bf16* k, const int64_t* rows, const Ahead* ahead, int64_t first) const {
    __m512 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      const bf16* row = k + rows[i];
      sums[i] = _mm512_setzero_ps();
      for (int64_t c = 0; c < chunks(); c++)
        sums[i] = dot_pairs(sums[i], load_chunk(q, c, head_dim()), load_chunk(row, c, head_dim()));
      if (ahead) ahead->fetch(first + i, head_dim());
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
  void add_values(int64_t c, const Stage& stage, const bf16* v, const Partial* partials, const Ahead* ahead) const {
    const Block& block = *stage.unit.block;
    __m512 sums[Heads][2 * Chunks];
    for (int h = 0; h < Heads; h++)
      for (int i = 0; i < 2 * Chunks; i++)
        sums[h][i] = _mm512_mul_ps(_mm512_load_ps(partials[h].sums + 32 * c + 16 * i), _mm512_set1_ps(stage.shrink[h]));
    for (int64_t t = 0; t < block.count; t += 2) {
      const bf16 *even = v + block.rows[t], *odd = v + block.rows[t + 1];
      if (ahead) ahead->fetch(t, head_dim()), ahead->fetch(t + 1, head_dim());
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
        std::memcpy(&pair, stage.weights[h] + t, 4);
        const __m512i weight = _mm512_set1_epi32(pair);
#pragma GCC unroll 8
        for (int i = 0; i < 2 * Chunks; i++) sums[h][i] = dot_pairs(sums[h][i], weight, pairs[i]);
      }
    }
    for (int h = 0; h < Heads; h++)
      for (int i = 0; i < 2 * Chunks; i++) _mm512_store_ps(partials[h].sums + 32 * c + 16 * i, sums[h][i]);
  }

  template <int Heads>
  void score(Stage& stage, const Ahead& ahead) const {
    const Unit& unit = stage.unit;
    const bf16* q = call.q + (unit.task->b * call.num_heads + unit.head) * head_dim();
    const bf16* k = call.kv.k + call.head_offset(unit.kv_head);
    for (int64_t t = 0; t < unit.block->count; t += 16)
      for (int h = 0; h < Heads; h++)
        stage.scores[h][t / 16] = scores(q + h * head_dim(), k, unit.block->rows + t, h == 0 ? &ahead : nullptr, t);
  }

  void weigh(Stage& stage, const Partials& partials) const {
    for (int64_t h = 0; h < stage.unit.num_heads; h++) {
      const Partial partial = partials.at(stage.unit.task->split, stage.unit.head + h);
      if (stage.unit.is_first) {
        std::fill(partial.sums, partial.sums + call.sums_size(), 0.0f);
        *partial.total = 0.0f, *partial.maximum = kNoScore;
      }
      stage.shrink[h] = softmax(stage.scores[h], stage.unit.block->count, partial, stage.weights[h]);
    }
  }

  template <int Heads>
  void add(const Stage& stage, const Partials& partials, const Ahead& ahead) const {
    const Unit& unit = stage.unit;
    const bf16* v = call.kv.v + call.head_offset(unit.kv_head);
    Partial mine[Heads];
    for (int h = 0; h < Heads; h++) mine[h] = partials.at(unit.task->split, unit.head + h);
    constexpr int kChunks = Heads <= 2 ? 4 : 2;
    int64_t c = 0;
    auto first = [&] { return c == 0 ? &ahead : nullptr; };
    for (; c + kChunks <= chunks(); c += kChunks) add_values<Heads, kChunks>(c, stage, v, mine, first());
    if (kChunks > 2 && c + 2 <= chunks()) add_values<Heads, 2>(c, stage, v, mine, first()), c += 2;
    for (; c < chunks(); c++) add_values<Heads, 1>(c, stage, v, mine, first());
  }

  // The scores of a unit are computed before the values of the one before it are added: nobody waits for a softmax.
  void work_off(Units& units, const Partials& partials, const std::vector<int64_t>& num_splits) const {
    Stage stages[2];
    for (int64_t n = 0;; n++) {
      Stage &stage = stages[n % 2], &before = stages[(n + 1) % 2];
      stage.unit = units.next();
      if (stage.unit.task) {
        const Ahead ahead(call, call.kv.k, units.ahead(Units::kLead));
        with_heads(stage.unit.num_heads, [&](auto heads) { score<heads>(stage, ahead); });
      }
      if (n > 0) {
        const Ahead ahead(call, call.kv.v, units.ahead(Units::kLead - 1));
        with_heads(before.unit.num_heads, [&](auto heads) { add<heads>(before, partials, ahead); });
        const Task& task = *before.unit.task;
        if (before.unit.is_last && num_splits[task.b] == 1)
          for (int64_t h = 0; h < before.unit.num_heads; h++)
            finish(partials, task.split, 1, task.b, before.unit.head + h);
      }
      if (!stage.unit.task) return;
      weigh(stage, partials);
    }
  }

  template <class F>
  static void with_heads(int64_t num_heads, F&& f) {
    switch (num_heads) {
      case 1: return f(std::integral_constant<int, 1>());
      case 2: return f(std::integral_constant<int, 2>());
      case 3: return f(std::integral_constant<int, 3>());
      default: return f(std::integral_constant<int, 4>());
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
    const __m512 scale = _mm512_set1_ps(1.0f / *whole.total);
    for (int64_t c = 0; c < chunks(); c++) {
      const float* sums = whole.sums + 32 * c;
      store_chunk(row, c, head_dim(), _mm512_load_ps(sums), _mm512_load_ps(sums + 16), scale);
    }
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

  // Heads do not meet, so few splits are shared out by head as well.
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
  std::atomic<size_t> next_task{0};
  team.run([&](int) {
    Units units(call, tasks, next_task);
    kernel.work_off(units, partials, num_splits);
  });
  std::vector<int64_t> to_merge;
  for (int64_t b = 0; b < batch; b++)
    if (num_splits[b] > 1) to_merge.push_back(b);
  team.each(int64_t(to_merge.size()), [&](int64_t i) {
    const int64_t b = to_merge[i];
    for (int64_t head = 0; head < call.num_heads; head++)
      kernel.finish(partials, first_split[b], num_splits[b], b, head);
  });
}

}  // namespace
}  // namespace baton::decode

namespace baton {

void decode_attention(Team& team, const bf16* q, const KVPages& kv, const Sequences& sequences, int64_t num_heads,
                      bf16* out) {
  const decode::Call call{q, kv, sequences, num_heads, out};
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
