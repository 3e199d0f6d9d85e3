// Products of decode attention: a few query heads of one KV head and a block of keys that is read only once.
//
// The sums have the order of attention_strips.h. Packing a block for so few rows would cost as much as reading it, so
// HeadStrips takes K and V as they lie in their pages. For each line of a block it prefetches one of the next block. Rows
// of K are read one after the other, as the hardware prefetches them.
#pragma once
#include "attention_keys.h"
#include "code_bytes.h"

namespace baton::decode {

// Strips of up to 4 heads. HeadDim is head_dim as a constant, or 0. Rows are bf16, or codes that become bf16 in
// registers: then Bytes is CodeBytes instead of void.
template <int HeadDim, class Bytes>
class HeadStrips {
 public:
  using Factor = baton::Factor;
  static constexpr int64_t kHeight = 4;
  static constexpr bool kTakesCodes = !std::is_void_v<Bytes>;

  explicit HeadStrips(int64_t head_dim) : any_head_dim_(head_dim) {}

  void take(const KeyBlock& block, const KeyBlock& next) { block_ = block, next_ = next; }

  // products [head][lane] = q k^T
  void multiply_keys(int64_t heads, const Factor* q, float* products) const {
    with_heads(heads, [&](auto num) { multiply_keys_of<num>(q, products); });
  }

  // sums [head][dim] += weights v, over the first num_lanes lanes
  void add_values(int64_t heads, const Factor* weights, int64_t num_lanes, float* sums) {
    with_heads(heads, [&](auto num) {
      constexpr int kChunks = std::min(num <= 2 ? 4 : 2, vectors_at_once(2 * num));
      const int64_t chunks = num_chunks(head_dim());
      int64_t c = 0;
      for (; c + kChunks <= chunks; c += kChunks) add_values_of<num, kChunks>(c, weights, num_lanes, sums);
      if (kChunks > 2 && c + 2 <= chunks) add_values_of<num, 2>(c, weights, num_lanes, sums), c += 2;
      for (; c < chunks; c++) add_values_of<num, 1>(c, weights, num_lanes, sums);
    });
    next_ = block_;  // further strips of this block prefetch nothing
  }

 private:
  int64_t head_dim() const { return HeadDim ? HeadDim : any_head_dim_; }
  int64_t padded_dim() const { return 32 * num_chunks(head_dim()); }

  template <class F>
  static void with_heads(int64_t heads, F&& f) {
    switch (heads) {
      case 1: return f(std::integral_constant<int, 1>());
      case 2: return f(std::integral_constant<int, 2>());
      case 3: return f(std::integral_constant<int, 3>());
      default: return f(std::integral_constant<int, 4>());
    }
  }

  static constexpr int64_t kElementNbytes = kTakesCodes ? 1 : sizeof(bf16);
  static constexpr int64_t kLine = 64 / kElementNbytes;  // dims of a cache line

  // Four times four bytes of 16 keys, pairs of dims or quads of codes, with keys as lanes.
  static void load_keys(const char* k, const int64_t* rows, Words (&pairs)[4]) {
    Words x[4];  // row 4 * l + i in quarter l of x[i]
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const auto row = [&](int l) { return k + rows[4 * l + i]; };
      x[i] = load_quarters(row(0), row(1), row(2), row(3));
    }
    const Words a = interleave_low_32(x[0], x[1]), b = interleave_high_32(x[0], x[1]);
    const Words c = interleave_low_32(x[2], x[3]), d = interleave_high_32(x[2], x[3]);
    pairs[0] = interleave_low_64(a, c), pairs[1] = interleave_high_64(a, c);
    pairs[2] = interleave_low_64(b, d), pairs[3] = interleave_high_64(b, d);
  }

  template <int Heads>
  [[gnu::noinline]] void multiply_keys_of(const Factor* q, float* products) const {
    const int64_t dim = padded_dim(), lines = (head_dim() + kLine - 1) / kLine;
    int64_t line = 0;  // of the next block
    for (int64_t lane = 0; lane < kKeys; lane += 16) {
      Floats sums[Heads];
      for (int h = 0; h < Heads; h++) sums[h] = floats(0.0f);
      for (int64_t d = 0; d < head_dim(); d += 16 / kElementNbytes) {
        Words keys[4];
        load_keys(block_.k + d * kElementNbytes, block_.keys->rows + lane, keys);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++, line++)
          _mm_prefetch(next_.k + next_.keys->rows[line / lines] + line % lines * 64, _MM_HINT_T1);
        const auto add = [&](int64_t first, Words pairs) {
#pragma GCC unroll 4
          for (int h = 0; h < Heads; h++) sums[h] = dot_pairs(sums[h], q + h * dim + first, pairs);
        };
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          if constexpr (kTakesCodes) {
            const Bytes bytes(keys[i]);
            add(d + 4 * i, bytes.pairs(0)), add(d + 4 * i + 2, bytes.pairs(2));
          } else {
            add(d + 2 * i, keys[i]);
          }
        }
      }
      for (int h = 0; h < Heads; h++) store(products + h * kKeys + lane, sums[h]);
    }
  }

  template <int Heads, int Chunks>
  [[gnu::noinline]] void add_values_of(int64_t c, const Factor* weights, int64_t num_lanes, float* sums) const {
    const int64_t dim = padded_dim();
    Floats x[Heads][2 * Chunks];
#pragma GCC unroll 4
    for (int h = 0; h < Heads; h++)
#pragma GCC unroll 8
      for (int i = 0; i < 2 * Chunks; i++) x[h][i] = load_floats(sums + h * dim + 32 * c + 16 * i);
    for (int64_t lane = 0; lane < num_lanes; lane += 2) {
      const char *even = block_.v + block_.keys->rows[lane], *odd = block_.v + block_.keys->rows[lane + 1];
      for (int64_t d = 0; c == 0 && d < head_dim(); d += kLine) {
        _mm_prefetch(next_.v + next_.keys->rows[lane] + d * kElementNbytes, _MM_HINT_T1);
        _mm_prefetch(next_.v + next_.keys->rows[lane + 1] + d * kElementNbytes, _MM_HINT_T1);
      }
      Words values[2 * Chunks];
#pragma GCC unroll 4
      for (int i = 0; i < Chunks; i++) {
        if constexpr (kTakesCodes) {
          const int64_t first = 32 * (c + i);
          const Bytes bytes = Bytes::of_rows(even + first, odd + first, head_dim() - first);
          values[2 * i] = bytes.interleaved(0), values[2 * i + 1] = bytes.interleaved(4);
        } else {
          const Words a = load_chunk(reinterpret_cast<const bf16*>(even), c + i, head_dim());
          const Words b = load_chunk(reinterpret_cast<const bf16*>(odd), c + i, head_dim());
          values[2 * i] = interleave_low(a, b), values[2 * i + 1] = interleave_high(a, b);
        }
      }
#pragma GCC unroll 4
      for (int h = 0; h < Heads; h++)
#pragma GCC unroll 8
        for (int i = 0; i < 2 * Chunks; i++) x[h][i] = dot_pairs(x[h][i], weights + h * kKeys + lane, values[i]);
    }
#pragma GCC unroll 4
    for (int h = 0; h < Heads; h++)
#pragma GCC unroll 8
      for (int i = 0; i < 2 * Chunks; i++) store(sums + h * dim + 32 * c + 16 * i, x[h][i]);
  }

  const int64_t any_head_dim_;
  KeyBlock block_{}, next_{};
};

}  // namespace baton::decode
