// Blocks of kKeys keys of a sequence, counted from its first token, and packing them.
//
// The order of the keys in a block is that of `key_of_lane`: one of each run of 16 keys in turn. All sums over keys run
// in this order. With pages of 16 tokens it reads several pages at a time. The hardware prefetches memory that is read
// in streams, and several streams hide the time that each takes to start (pages of 24 KB in random order, Zen 4: 15
// GB/s one by one, 26 GB/s eight at once).
#pragma once
#include "attention_rows.h"

namespace baton {

constexpr int64_t kKeys = 64, kRuns = kKeys / 16;

inline int64_t key_of_lane(int64_t lane) { return lane % kRuns * 16 + lane / kRuns; }

// The lanes [first, first + 16) whose keys are among the first `count` of a block.
inline Lanes lanes_of_keys(int64_t first, int64_t count) {
  static_assert(kRuns == 4);
  alignas(64) static constexpr int32_t kKeysOfLanes[] = {0, 16, 32, 48, 1, 17, 33, 49, 2, 18, 34, 50, 3, 19, 35, 51};
  return less(load_words(kKeysOfLanes), words(int(count - first / kRuns)));
}

// The lanes before and up to the last of the first `count` keys.
inline int64_t num_lanes(int64_t count) { return count >= 16 ? kKeys : kRuns * count; }

// The offsets of the keys of a block by lane, of tokens [begin, end) of the context. Lanes without a key have those of
// another one.
struct KeyRows {
  void find(const KVPages& kv, const int32_t* pages, int64_t first, int64_t begin, int64_t end) {
    int64_t rows_in_order[kKeys], scales_in_order[kKeys];
    count = std::clamp<int64_t>(end - first, 0, kKeys);
    find_rows(kv, pages, first, count, rows_in_order, scales_in_order);
    for (int64_t lane = 0; lane < kKeys && count > 0; lane++) {
      const int64_t key = std::clamp(key_of_lane(lane), std::max<int64_t>(begin - first, 0), count - 1);
      rows[lane] = rows_in_order[key], scales[lane] = scales_in_order[key];
    }
  }

  int64_t count = 0;
  int64_t rows[kKeys] = {}, scales[kKeys] = {};
};

// K and V of a block for one KV head: `keys` has offsets from both.
struct KeyBlock {
  const char *k, *v;
  const KeyRows* keys;

  const bf16* k_row(int64_t lane) const { return reinterpret_cast<const bf16*>(k + keys->rows[lane]); }
  const bf16* v_row(int64_t lane) const { return reinterpret_cast<const bf16*>(v + keys->rows[lane]); }
};

// The scales of a block of codes by lane.
struct KeyScales {
  alignas(64) float k[kKeys], v[kKeys];
};

// What strips take of a block: the block itself, or its codes as bf16, which has each of them exactly.
class KeyReader {
 public:
  explicit KeyReader(const KVPages& kv)
      : kv_(kv), k_(kv.has_codes ? kKeys * kv.head_dim : 0), v_(kv.has_codes ? kKeys * kv.head_dim : 0) {
    for (int64_t lane = 0; lane < kKeys; lane++) rows_.rows[lane] = lane * kv.head_dim * int64_t(sizeof(bf16));
  }

  template <class Strips>
  void give(Strips& strips, const KeyBlock& block, const KeyBlock& next) {
    if (kv_.has_codes) read_scales(block, next);
    if (!kv_.has_codes || Strips::kTakesCodes) return strips.take(block, next);
    unpack(block, next);
    const KeyBlock unpacked{reinterpret_cast<const char*>(k_.data), reinterpret_cast<const char*>(v_.data), &rows_};
    strips.take(unpacked, unpacked);
  }

  // Of the block that was given last. Null where there are none.
  const KeyScales* scales() const { return kv_.has_codes ? &scales_ : nullptr; }

 private:
  void read_scales(const KeyBlock& block, const KeyBlock& next) {
    for (int64_t lane = 0; lane < kRuns; lane++)
      for (const char* base : {next.k, next.v}) _mm_prefetch(base + next.keys->scales[lane], _MM_HINT_T1);
    for (int64_t lane = 0; lane < kKeys; lane++) {
      std::memcpy(&scales_.k[lane], block.k + block.keys->scales[lane], sizeof(float));
      std::memcpy(&scales_.v[lane], block.v + block.keys->scales[lane], sizeof(float));
    }
  }

  [[gnu::noinline]] void unpack(const KeyBlock& block, const KeyBlock& next) {
    rows_.count = block.keys->count;
    for (int64_t lane = 0; lane < kKeys; lane++) {
      const int64_t row = block.keys->rows[lane], ahead = next.keys->rows[lane];
      for (int64_t line = 0; line < kv_.head_dim; line += 64) {
        _mm_prefetch(next.k + ahead + line, _MM_HINT_T1);
        _mm_prefetch(next.v + ahead + line, _MM_HINT_T1);
      }
      for (int64_t d = 0; d < kv_.head_dim; d += 16) {
        unpack16(block.k + row + d, k_.data + lane * kv_.head_dim + d);
        unpack16(block.v + row + d, v_.data + lane * kv_.head_dim + d);
      }
    }
  }

  static void unpack16(const char* codes, bf16* to) {
    const Words x = from_signed(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const Words upper = shift_right(as_words(to_floats(x)), 16);  // the lower half is 0
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_halves(upper));
  }

  const KVPages kv_;
  const CacheLines<bf16> k_, v_;  // [lanes][head_dim]
  KeyRows rows_;
  KeyScales scales_;
};

// A block packed once for all rows of a task: K by dims with keys as lanes, V by keys with dims as lanes. Of bf16, two dims
// or two keys are a pair: [dim / 2][keys][2] and [keys / 2][dim][2], which AMX takes as well.
template <class Factor>
struct PackedKeys {
  explicit PackedKeys(int64_t dim) : k(kKeys * dim), v(kKeys * dim) {}

  void pack(const KeyBlock& block, const KeyBlock& next, int64_t head_dim) const;

  CacheLines<Factor> k;  // [dim][keys]
  CacheLines<Factor> v;  // [keys][dim], dims of a chunk in the order of interleave()
};

// Zeros are written where there is no key, over the values of an earlier owner of the page. For each line that is read
// one of the next block is prefetched.
template <class Factor>
void PackedKeys<Factor>::pack(const KeyBlock& block, const KeyBlock& next, int64_t head_dim) const {
  const int64_t chunks = num_chunks(head_dim), dim = 32 * chunks;
  for (int64_t lane = 0; lane < kKeys; lane += 16) {
    const Lanes there = lanes_of_keys(lane, block.keys->count);
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      Words square[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) {
        square[i] = load_chunk(block.k_row(lane + i), chunk, head_dim);
        _mm_prefetch(next.k_row(lane + i) + 32 * chunk, _MM_HINT_T1);
      }
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++)
        store_pairs(k.data + (32 * chunk + 2 * i) * kKeys + kFactors<Factor> * lane, kKeys, where(there, square[i]));
    }
  }
  auto load_value = [&](int64_t lane, int64_t chunk) {
    _mm_prefetch(next.v_row(lane) + 32 * chunk, _MM_HINT_T1);
    const Lanes there = lanes_before(key_of_lane(lane) < block.keys->count ? 16 : 0);
    return where(there, load_chunk(block.v_row(lane), chunk, head_dim));
  };
  for (int64_t lane = 0; lane < kKeys; lane += 2)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      const Words even = load_value(lane, chunk), odd = load_value(lane + 1, chunk);
      Factor* const to = v.data + lane * dim + kFactors<Factor> * 32 * chunk;
      store_pairs(to, dim, interleave_low(even, odd));
      store_pairs(to + kFactors<Factor> * 16, dim, interleave_high(even, odd));
    }
}

}  // namespace baton
