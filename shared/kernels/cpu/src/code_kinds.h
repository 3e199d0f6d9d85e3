// The kinds of codes that a weight has: what a code stands for, and how its scales are stored.
//
// Kernels take the kind as a type. Bytes of a kind are unsigned and have a zero, whose product is taken from their sums.
#pragma once
#include "vec.h"

namespace baton {

// A byte is a code itself. Of codes of 4 bits a byte in memory has two.
template <int Bits>
struct Whole {
  static constexpr int kBits = Bits, kZero = 1 << (Bits - 1);  // the zero where a weight has none of its own
  using Scale = float;

  static Words lower(Words codes) { return lower_nibbles(codes); }
  static Words upper(Words codes) { return upper_nibbles(codes); }
  static Floats scales(const Scale* p) { return load_floats(p); }
};
using Int8 = Whole<8>;
using Int4 = Whole<4>;

// FP4 (e2m1) in groups with powers of two (MXFP4). A byte is twice a number, which is whole, plus 12. A scale is the
// exponent of a float32, 0 for 0.
struct Fp4 {
  static constexpr int kBits = 4, kZero = 12;
  using Scale = uint8_t;

  static Words lower(Words codes) {
    return look_up(codes, _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  }
  static Words upper(Words codes) { return lower(shift_right(codes, 4)); }
  static Floats scales(const Scale* p) {
    return as_floats(shift_left(from_unsigned(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 23));
  }
};

}  // namespace baton
