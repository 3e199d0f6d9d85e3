// The digest of a chunk of KV pages, taken while the pages are copied. `shared/kvcache/page_digest.py` defines it.

#pragma once

#include <cstdint>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace page_digest {

// The generic vectors of GCC and Clang, which any CPU can run.
typedef uint64_t Words __attribute__((vector_size(64), may_alias));
typedef uint32_t Halves __attribute__((vector_size(64), may_alias));
typedef int64_t SignedWords __attribute__((vector_size(64), may_alias));

constexpr int64_t kLine = sizeof(Words);
constexpr int64_t kLanes = 8;

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

constexpr uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// The keys of the halves of the words of line 0, and what is added to them at each further line.
struct Keys {
  Halves of_line, step;

  Keys() {
    for (int64_t i = 0; i < 2 * kLanes; i++) {
      const uint64_t random = mix((i + 1) * kGolden);
      of_line[i] = static_cast<uint32_t>(random);
      step[i] = static_cast<uint32_t>(random >> 32) | 1;
    }
  }

  // The keys of this line. The next call returns those of the next line.
  Halves next() {
    const Halves keys = of_line;
    of_line += step;
    return keys;
  }
};

inline Words of_line(const Words& line, const Halves& keys) {
#ifdef __AVX512F__
  const __m512i x = reinterpret_cast<__m512i>(line);
  const __m512i keyed = _mm512_add_epi32(x, reinterpret_cast<__m512i>(keys));
  const __m512i product = _mm512_mul_epi32(keyed, _mm512_srli_epi64(keyed, 32));
  return reinterpret_cast<Words>(_mm512_add_epi64(product, _mm512_shuffle_epi32(x, _MM_PERM_BADC)));
#else
  const SignedWords keyed = reinterpret_cast<SignedWords>(reinterpret_cast<Halves>(line) + keys);
  return reinterpret_cast<Words>(((keyed << 32) >> 32) * (keyed >> 32)) +
         __builtin_shufflevector(line, line, 1, 0, 3, 2, 5, 4, 7, 6);
#endif
}

// What slice `index` of a chunk adds to the digest of the chunk: `lanes` is the sum over the lines of the slice.
inline uint64_t of_slice(const Words& lanes, uint64_t seed, int64_t index) {
  uint64_t sum = 0;
  for (int64_t lane = 0; lane < kLanes; lane++) sum += mix(lanes[lane] + seed + (index * kLanes + lane + 1) * kGolden);
  return sum;
}

}  // namespace page_digest
