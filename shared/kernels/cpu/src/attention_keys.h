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
inline __mmask16 lanes_of_keys(int64_t first, int64_t count) {
  static_assert(kRuns == 4);
  const __m512i keys = _mm512_setr_epi32(0, 16, 32, 48, 1, 17, 33, 49, 2, 18, 34, 50, 3, 19, 35, 51);
  return _mm512_cmplt_epi32_mask(keys, _mm512_set1_epi32(int(count - first / kRuns)));
}

// The lanes before and up to the last of the first `count` keys.
inline int64_t num_lanes(int64_t count) { return count >= 16 ? kKeys : kRuns * count; }

// The addresses of the keys of a block by lane, for KV head 0. Lanes without a key have the address of another one.
struct KeyRows {
  void find(const KVPages& kv, const int32_t* pages, int64_t first, int64_t end) {
    int64_t in_order[kKeys];
    count = std::clamp<int64_t>(end - first, 0, kKeys);
    find_rows(kv, pages, first, count, in_order);
    for (int64_t lane = 0; lane < kKeys && count > 0; lane++)
      rows[lane] = in_order[std::min(key_of_lane(lane), count - 1)];
  }

  int64_t count = 0;
  int64_t rows[kKeys] = {};
};

// K and V of a block for one KV head.
struct KeyBlock {
  const bf16 *k, *v;
  const KeyRows* keys;
};

// A block packed once for all rows of a task: K by pairs of dims with keys as lanes, V by pairs of keys with dims as
// lanes. AMX takes both as well.
struct PackedKeys {
  explicit PackedKeys(int64_t dim) : k(kKeys * dim), v(kKeys * dim) {}

  void pack(const KeyBlock& block, const KeyBlock& next, int64_t head_dim) const;

  Scratch<bf16> k;  // [dim / 2][keys][2]
  Scratch<bf16> v;  // [keys / 2][dim][2], dims of a chunk in the order of interleave()
};

// Zeros are written where there is no key, over the values of an earlier owner of the page. For each line that is read
// one of the next block is prefetched.
inline void PackedKeys::pack(const KeyBlock& block, const KeyBlock& next, int64_t head_dim) const {
  const int64_t chunks = num_chunks(head_dim), dim = 32 * chunks;
  const int64_t *const rows = block.keys->rows, *const ahead = next.keys->rows;
  for (int64_t lane = 0; lane < kKeys; lane += 16) {
    const __mmask16 there = lanes_of_keys(lane, block.keys->count);
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      __m512i square[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) {
        square[i] = load_chunk(block.k + rows[lane + i], chunk, head_dim);
        _mm_prefetch(next.k + ahead[lane + i] + 32 * chunk, _MM_HINT_T1);
      }
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++)
        _mm512_store_si512(k.data + ((16 * chunk + i) * kKeys + lane) * 2, _mm512_maskz_mov_epi32(there, square[i]));
    }
  }
  auto load_value = [&](int64_t lane, int64_t chunk) {
    _mm_prefetch(next.v + ahead[lane] + 32 * chunk, _MM_HINT_T1);
    const __mmask16 there = key_of_lane(lane) < block.keys->count ? 0xffff : 0;
    return _mm512_maskz_mov_epi32(there, load_chunk(block.v + rows[lane], chunk, head_dim));
  };
  for (int64_t lane = 0; lane < kKeys; lane += 2)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
      const __m512i even = load_value(lane, chunk), odd = load_value(lane + 1, chunk);
      bf16* pair = v.data + lane * dim + 64 * chunk;
      _mm512_store_si512(pair, interleave_low(even, odd));
      _mm512_store_si512(pair + 32, interleave_high(even, odd));
    }
}

}  // namespace baton
