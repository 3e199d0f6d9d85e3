// The digest of a chunk of KV pages, taken while the pages are copied. `shared/kvcache/page_digest.py` defines it.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace page_digest {

// A vector holds whole pairs of words of 64 bits, and a line is 64 bytes of vectors.
//   add64, add32   of words, of halves of words
//   product        of the halves of each word, as signed numbers
//   swapped        the words of each pair have changed places
//   stream         stores past the caches; `to` is a multiple of the vector
#if defined(__AVX512F__)
typedef __m512i Vector;
inline Vector load(const char* from) { return _mm512_loadu_si512(from); }
inline void store(char* to, Vector x) { _mm512_storeu_si512(to, x); }
inline void stream(char* to, Vector x) { _mm512_stream_si512(reinterpret_cast<Vector*>(to), x); }
inline Vector add64(Vector x, Vector y) { return _mm512_add_epi64(x, y); }
inline Vector add32(Vector x, Vector y) { return _mm512_add_epi32(x, y); }
inline Vector product(Vector x) { return _mm512_mul_epi32(x, _mm512_srli_epi64(x, 32)); }
inline Vector swapped(Vector x) { return _mm512_shuffle_epi32(x, _MM_PERM_BADC); }
#elif defined(__AVX2__)
typedef __m256i Vector;
inline Vector load(const char* from) { return _mm256_loadu_si256(reinterpret_cast<const Vector*>(from)); }
inline void store(char* to, Vector x) { _mm256_storeu_si256(reinterpret_cast<Vector*>(to), x); }
inline void stream(char* to, Vector x) { _mm256_stream_si256(reinterpret_cast<Vector*>(to), x); }
inline Vector add64(Vector x, Vector y) { return _mm256_add_epi64(x, y); }
inline Vector add32(Vector x, Vector y) { return _mm256_add_epi32(x, y); }
inline Vector product(Vector x) { return _mm256_mul_epi32(x, _mm256_srli_epi64(x, 32)); }
inline Vector swapped(Vector x) { return _mm256_shuffle_epi32(x, _MM_SHUFFLE(1, 0, 3, 2)); }
#else
struct Vector {
  uint64_t first, second;
};
inline uint64_t add_halves(uint64_t x, uint64_t y) {
  return (((x >> 32) + (y >> 32)) << 32) | static_cast<uint32_t>(x + y);
}
inline uint64_t product_of_halves(uint64_t x) {
  return static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(x)) * static_cast<int32_t>(x >> 32));
}
inline Vector load(const char* from) {
  Vector x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}
inline void store(char* to, Vector x) { std::memcpy(to, &x, sizeof(x)); }
#ifdef __SSE2__
inline void stream(char* to, Vector x) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_loadu_si128(reinterpret_cast<const __m128i*>(&x)));
}
#else
inline void stream(char* to, Vector x) { store(to, x); }
#endif
inline Vector add64(Vector x, Vector y) { return {x.first + y.first, x.second + y.second}; }
inline Vector add32(Vector x, Vector y) { return {add_halves(x.first, y.first), add_halves(x.second, y.second)}; }
inline Vector product(Vector x) { return {product_of_halves(x.first), product_of_halves(x.second)}; }
inline Vector swapped(Vector x) { return {x.second, x.first}; }
#endif

constexpr int64_t kLine = 64;
constexpr int64_t kWords = kLine / sizeof(uint64_t);
constexpr int64_t kVectors = kLine / sizeof(Vector);

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

constexpr uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

struct Line {
  Vector vectors[kVectors];
};

inline Line load_line(const void* from) {
  Line line;
  for (int64_t i = 0; i < kVectors; i++)
    line.vectors[i] = load(static_cast<const char*>(from) + i * static_cast<int64_t>(sizeof(Vector)));
  return line;
}

// The keys of the halves of the words of one line after the other.
class Keys {
 public:
  Keys() {
    uint32_t first[2 * kWords], step[2 * kWords];
    for (int64_t i = 0; i < 2 * kWords; i++) {
      const uint64_t random = mix((i + 1) * kGolden);
      first[i] = static_cast<uint32_t>(random);
      step[i] = static_cast<uint32_t>(random >> 32) | 1;
    }
    keys_ = load_line(first), step_ = load_line(step);
  }

  Line next() {
    const Line keys = keys_;
    for (int64_t i = 0; i < kVectors; i++) keys_.vectors[i] = add32(keys_.vectors[i], step_.vectors[i]);
    return keys;
  }

 private:
  Line keys_, step_;
};

// Adds a vector of a line to the lanes of its slice.
inline void add(Vector& lanes, Vector x, Vector keys) {
  lanes = add64(lanes, add64(product(add32(x, keys)), swapped(x)));
}

// What slice `index` of a chunk adds to the digest of the chunk. `lanes` are the sums of the slice.
inline uint64_t of_slice(const Line& lanes, uint64_t seed, int64_t index) {
  uint64_t words[kWords], sum = 0;
  std::memcpy(words, &lanes, kLine);
  for (int64_t w = 0; w < kWords; w++) sum += mix(words[w] + seed + (index * kWords + w + 1) * kGolden);
  return sum;
}

}  // namespace page_digest
