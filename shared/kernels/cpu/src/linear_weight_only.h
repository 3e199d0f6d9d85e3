// Rows of bf16 times one panel of codes, for layers whose activations stay in 16 bits.
//
// Codes less their zeros become bf16, which has them exactly, and are multiplied as a panel of bf16 is: for a few rows
// in registers, for more by way of the L1 cache, up to kPart k at a time. Sums of such parts times the scales are added
// up in ascending order.
#pragma once
#include <algorithm>

#include "linear_amx.h"
#include "linear_vectors.h"
#include "linear_int8.h"

namespace baton::weight_only {

constexpr int64_t kPart = 128, kBlockRows = 192, kFewRows = 8;

#ifdef BATON_HAS_AMX
constexpr int64_t kMaxRows = amx::kMaxRows;
#else
constexpr int64_t kMaxRows = vectors::kMaxRows;
#endif

// The bytes of the bf16 of n, at n mod 64. n is in [-32, 32).
struct SmallNumbers {
  alignas(64) uint8_t low[64] = {}, high[64] = {};

  constexpr SmallNumbers() {
    for (int n = -32; n < 32; n++) {
      const unsigned size = n < 0 ? -n : n;
      unsigned exponent = 0;
      while (size >> (exponent + 1)) exponent++;
      const unsigned bits = size == 0 ? 0 : (127 + exponent) << 7 | ((size << (7 - exponent)) & 0x7f);
      low[n & 63] = uint8_t(bits), high[n & 63] = uint8_t(bits >> 8 | (n < 0 ? 0x80 : 0));
    }
  }
};
inline constexpr SmallNumbers kSmallNumbers;

// Of four codes in each lane, less the zero of the lane, the bf16 of bytes 0 and 2, and those of bytes 1 and 3.
struct Pairs {
  Words first, second;
};

template <class Code>
Pairs pairs_of(Words codes, Words zero) {
#ifdef __AVX512VBMI__
  if constexpr (Code::kBits == 4) {
    const Words n = _mm512_sub_epi8(codes, multiply(zero, words(0x01010101)));
    const Words low = _mm512_permutexvar_epi8(n, load_words(kSmallNumbers.low));
    const Words high = _mm512_permutexvar_epi8(n, load_words(kSmallNumbers.high));
    constexpr int select = 0xca;  // of the first operand's bits 1 the second's, else the third's
    const Words even = _mm512_set1_epi16(0x00ff);
    return {_mm512_ternarylogic_epi32(even, low, _mm512_slli_epi16(high, 8), select),
            _mm512_ternarylogic_epi32(even, _mm512_srli_epi16(low, 8), high, select)};
  }
#endif
  const auto number = [&](int byte) {
    const Words code = shift_right(codes, 8 * byte) & words(0xff);
    return as_words(to_floats(subtract(code, zero)));
  };
  const auto pair = [&](int lower, int upper) {  // the lower half of each float32 is 0
    return shift_right(number(lower), 16) | number(upper);
  };
  return {pair(0, 2), pair(1, 3)};
}

// A part of a group of a panel: k [first, first + size).
template <class Code>
struct Part {
  const uint8_t* codes;
  const uint8_t* zeros;                // [64], or null
  const typename Code::Scale* scales;  // [64]
  int64_t size;
};

template <class Code>
Part<Code> part_of(const int8::Panel<Code>& panel, int64_t group, int64_t first, int64_t size) {
  const uint8_t* const zeros = panel.zeros ? panel.zeros + group * kPanel : nullptr;
  return {panel.codes + first * Code::kBits / 8 * kPanel, zeros, panel.scales + group * kPanel, size};
}

template <class Code>
Words zero_of(const Part<Code>& part, int j) {
  if (part.zeros == nullptr) return words(Code::kZero);
  return from_unsigned(_mm_loadu_si128(reinterpret_cast<const __m128i*>(part.zeros + 16 * j)));
}

// Calls take(i, w) for each pair of k of a unit: 16 columns of two bf16.
template <class Code, class Take>
void each_pair(Words unit, Words zero, Take&& take) {
  const auto four = [&](int i, Words codes) {
    const Pairs pairs = pairs_of<Code>(codes, zero);
    take(i, pairs.first), take(i + 1, pairs.second);
  };
  if constexpr (Code::kBits == 8) return four(0, unit);
  four(0, Code::lower(unit)), four(2, Code::upper(unit));
}

// to [size / 2][64][2] = the part, less its zeros.
template <class Code>
void unpack(const Part<Code>& part, bf16* to) {
  constexpr int64_t kCodes = 32 / Code::kBits;  // of a unit
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const Words zero = zero_of<Code>(part, j);
    for (int64_t unit = 0; unit < part.size / kCodes; unit++) {
      bf16* const out = to + unit * kCodes * kPanel + 32 * j;
      each_pair<Code>(load_words(part.codes + unit * 4 * kPanel + 64 * j), zero,
                      [&](int i, Words w) { store(out + 2 * i * kPanel, w); });
    }
  }
}

// sums [R][16 * J] from column 16 * first on, which are those of the unpacked part by vectors, without storing it.
template <class Code, int R, int J>
inline void sum_few_columns(const Part<Code>& part, int first, const Factor* x, int64_t stride, float* y) {
  constexpr int64_t kCodes = 32 / Code::kBits;
  Floats sums[R][J];
  Words zero[J];
#pragma GCC unroll 4
  for (int j = 0; j < J; j++) {
    zero[j] = zero_of<Code>(part, first + j);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) sums[r][j] = floats(0.0f);
  }
  for (int64_t unit = 0; unit < part.size / kCodes; unit++)
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) {
      const uint8_t* const codes = part.codes + unit * 4 * kPanel + 64 * (first + j);
      _mm_prefetch(codes + kAhead, _MM_HINT_T1);
      each_pair<Code>(load_words(codes), zero[j], [&](int i, Words w) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) sums[r][j] = dot_pairs(sums[r][j], x + r * stride + unit * kCodes + 2 * i, w);
      });
    }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int j = 0; j < J; j++) store(y + r * kPanel + 16 * (first + j), sums[r][j]);
}

template <class Code, int R>
void sum_few(const Part<Code>& part, const Factor* x, int64_t stride, float* y) {
  constexpr int J = vectors_at_once(R);
  for (int j = 0; j < 4; j += J) sum_few_columns<Code, R, J>(part, j, x, stride, y);
}

// Multiplies rows of x by parts: by tiles where they fit, a few rows without unpacking, others by vectors.
template <class Code>
class Product {
 public:
  Product(int64_t num_rows, [[maybe_unused]] int64_t group) {
#ifdef BATON_HAS_AMX
    by_tiles_ = group % amx::kTileK == 0 && amx::permitted();
#endif
    are_few_ = !by_tiles_ && num_rows <= kFewRows;
    max_rows = by_tiles_ ? kMaxRows : are_few_ ? 4 : vectors::kMaxRows;
  }
  ~Product() {
#ifdef BATON_HAS_AMX
    if (configured_ > 0) amx::release();
#endif
  }
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  void begin(const Part<Code>& part) {
    part_ = part;
    if (!are_few_) unpack<Code>(part, unpacked_);
  }

  // sums [rows][64] of up to max_rows rows of x, `stride` elements from row to row.
  void operator()(const bf16* x, int64_t stride, int64_t rows, float* sums) {
    const vectors::Chunk<bf16> chunk{x, unpacked_, stride, part_.size / 2, true};
    if (are_few_) {
      alignas(64) Factor wide[4 * vectors::kChunk];
      const vectors::Chunk<Factor> few = vectors::factors_of(chunk, rows, wide);
      switch (rows) {
        case 1: return sum_few<Code, 1>(part_, few.x, few.stride, sums);
        case 2: return sum_few<Code, 2>(part_, few.x, few.stride, sums);
        case 3: return sum_few<Code, 3>(part_, few.x, few.stride, sums);
        default: return sum_few<Code, 4>(part_, few.x, few.stride, sums);
      }
    }
#ifdef BATON_HAS_AMX
    if (by_tiles_) {
      if (rows != configured_) amx::configure(amx::shapes_of(configured_ = int(rows)));
      if (rows > amx::kTileRows) amx::sum_32_rows(x, stride, part_.size, unpacked_, true, sums);
      else amx::sum_16_rows(x, stride, part_.size, unpacked_, true, sums);
      return;
    }
#endif
    vectors::sum_rows(rows, 0, chunk, nullptr, sums);
  }

  int64_t max_rows;

 private:
  alignas(64) bf16 unpacked_[kPart * kPanel];
  Part<Code> part_{};
  bool by_tiles_ = false, are_few_;
  [[maybe_unused]] int configured_ = 0;
};

// y [64] (+)= sums * scales.
template <class Code>
void scale_sums(const float* sums, const typename Code::Scale* scales, bool is_first, float* y) {
#pragma GCC unroll 4
  for (int i = 0; i < kPanel; i += 16) {
    const Floats sum = load_floats(sums + i), scale = Code::scales(scales + i);
    store(y + i, is_first ? sum * scale : fmadd(sum, scale, load_floats(y + i)));
  }
}

// Calls finish(row, y) for rows [begin, end) of x, which are in the order of the weight, times the panel.
template <class Code, class Finish>
void rows_times_panel(const bf16* x, int64_t begin, int64_t end, int64_t k, int64_t group,
                      const int8::Panel<Code>& panel, Finish&& finish) {
  alignas(64) float sums[kMaxRows * kPanel], y[kBlockRows * kPanel];
  Product<Code> product(end - begin, group);
  for (int64_t first = begin; first < end; first += kBlockRows) {
    const int64_t last = std::min(end, first + kBlockRows);
    for (int64_t at = 0; at < k;) {
      const int64_t g = at / group, size = std::min(kPart, (g + 1) * group - at);
      const Part<Code> part = part_of<Code>(panel, g, at, size);
      product.begin(part);
      for (int64_t row = first; row < last;) {
        const int64_t rows = std::min(product.max_rows, last - row);
        product(x + row * k + at, k, rows, sums);
        for (int64_t r = 0; r < rows; r++, row++)
          scale_sums<Code>(sums + r * kPanel, part.scales, at == 0, y + (row - first) * kPanel);
      }
      at += size;
    }
    for (int64_t row = first; row < last; row++) finish(row, y + (row - first) * kPanel);
  }
}

}  // namespace baton::weight_only
