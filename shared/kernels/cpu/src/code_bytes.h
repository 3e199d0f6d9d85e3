// Codes of 8 bits as bf16 in registers, exactly, where AVX512 has tables of bytes (VBMI).
#pragma once
#include "vec.h"

#ifdef __AVX512VBMI__
#define BATON_HAS_CODE_BYTES 1

namespace baton {

// The two bytes of the bf16 of each |code|. -128 is no code.
struct CodeTable {
  alignas(64) uint8_t low[128] = {}, high[128] = {};

  constexpr CodeTable() {
    for (unsigned n = 1; n < 128; n++) {
      unsigned exponent = 0;
      while (n >> (exponent + 1)) exponent++;
      const unsigned bits = (127 + exponent) << 7 | ((n << (7 - exponent)) & 0x7f);
      low[n] = uint8_t(bits), high[n] = uint8_t(bits >> 8);
    }
  }
};
inline constexpr CodeTable kCodeTable;

// 64 codes, as the lower and the upper bytes of their bf16.
struct CodeBytes {
  explicit CodeBytes(__m512i codes) {
    const auto look_up = [n = _mm512_abs_epi8(codes)](const uint8_t* table) {
      return _mm512_permutex2var_epi8(_mm512_load_si512(table), n, _mm512_load_si512(table + 64));
    };
    low = look_up(kCodeTable.low);
    const __m512i sign = _mm512_set1_epi8(char(0x80));
    high = _mm512_ternarylogic_epi32(look_up(kCodeTable.high), codes, sign, 0xf8);  // high | (codes & sign)
  }

  // 32 codes of one row, then 32 of another; 16 and zeros where a row ends.
  static CodeBytes of_rows(const char* even, const char* odd, int64_t count) {
    const __mmask32 there = count >= 32 ? ~__mmask32(0) : 0xffff;
    const __m512i first = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(there, even));
    return CodeBytes(_mm512_inserti64x4(first, _mm256_maskz_loadu_epi8(there, odd), 1));
  }

  // Of each four codes the pair [first, first + 1]: 16 pairs.
  __m512i pairs(int first) const { return choose(kIndices.pairs[first / 2]); }

  // Of 32 codes of one row and 32 of the next, what interleave_low (first = 0) and interleave_high (4) give of them.
  __m512i interleaved(int first) const { return choose(kIndices.interleaved[first / 4]); }

  __m512i low, high;

 private:
  struct Indices {
    alignas(64) uint8_t pairs[2][64] = {}, interleaved[2][64] = {};

    constexpr Indices() {
      for (int which = 0; which < 2; which++)
        for (int lane = 0; lane < 16; lane++)
          for (int i = 0; i < 2; i++) {
            const int of_pair = 4 * lane + 2 * which + i;
            const int of_row = 32 * i + lane / 4 * 8 + lane % 4 + 4 * which;
            for (int upper = 0; upper < 2; upper++) {
              pairs[which][4 * lane + 2 * i + upper] = uint8_t(64 * upper + of_pair);
              interleaved[which][4 * lane + 2 * i + upper] = uint8_t(64 * upper + of_row);
            }
          }
    }
  };
  static const Indices kIndices;

  __m512i choose(const uint8_t* indices) const {
    return _mm512_permutex2var_epi8(low, _mm512_load_si512(indices), high);
  }
};
inline constexpr CodeBytes::Indices CodeBytes::kIndices;

}  // namespace baton
#endif
