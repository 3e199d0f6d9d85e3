// A few functions over AMX tiles: eight registers of up to 16 rows of 64 bytes, and C += A * B of bf16 pairs or bytes.
//
// AMX is available if the compiler targets it and the OS permits it to this process. With -DBATON_EMULATE_AMX plain
// C++ replaces it, so that the code that uses it can be tested on any machine. Instructions are inline assembly
// because GCC's intrinsics take no template arguments as tile numbers.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1 chapter 18, TDPBF16PS and TDPBSUD.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "vec.h"

#if defined(BATON_EMULATE_AMX) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__))
#define BATON_HAS_AMX 1
#endif

#ifdef BATON_HAS_AMX
namespace baton::amx {

// The operand of LDTILECFG: the rows of each tile, and the bytes of a row.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_bytes = 64) {
    rows[tile] = uint8_t(num_rows);
    row_bytes[tile] = uint16_t(num_bytes);
  }
};
static_assert(sizeof(Shapes) == 64);

#ifdef BATON_EMULATE_AMX

struct Tiles {
  Shapes shapes;
  float data[8][16][16];  // a row is 16 float32 or int32, 16 pairs of bf16, or 64 bytes
};
inline Tiles& tiles() {
  thread_local Tiles tiles;
  return tiles;
}

inline bool permitted() { return true; }
inline void configure(const Shapes& shapes) {
  tiles().shapes = shapes;
  std::memset(tiles().data, 0, sizeof tiles().data);
}
inline void release() { tiles().shapes = Shapes{}; }

template <int T>
void zero() {
  std::memset(tiles().data[T], 0, sizeof tiles().data[T]);
}

template <int T>
void load(const void* from, int64_t stride_bytes) {
  zero<T>();
  for (int row = 0; row < tiles().shapes.rows[T]; row++)
    std::memcpy(tiles().data[T][row], static_cast<const char*>(from) + row * stride_bytes, tiles().shapes.row_bytes[T]);
}

template <int T>
void store(void* to, int64_t stride_bytes) {
  for (int row = 0; row < tiles().shapes.rows[T]; row++)
    std::memcpy(static_cast<char*>(to) + row * stride_bytes, tiles().data[T][row], tiles().shapes.row_bytes[T]);
}

// Shapes with which the instructions raise #UD do the same here: C [m][n] += A [m][k] B [k][n], of tiles in use.
inline void check_shapes(int c, int a, int b) {
  const Shapes& s = tiles().shapes;
  const bool fit = s.rows[c] == s.rows[a] && s.row_bytes[c] == s.row_bytes[b] && s.row_bytes[a] == 4 * s.rows[b];
  if (!fit || s.rows[c] == 0 || s.rows[b] == 0) __builtin_trap();
}

// The even and the odd products are summed separately from zero. Then both sums are added to C.
template <int C, int A, int B>
void dot() {
  check_shapes(C, A, B);
  Tiles& t = tiles();
  for (int m = 0; m < t.shapes.rows[C]; m++)
    for (int n = 0; n < t.shapes.row_bytes[C] / 4; n++) {
      float even = 0, odd = 0;
      for (int k = 0; k < t.shapes.row_bytes[A] / 4; k++) {
        bf16 a[2], b[2];
        std::memcpy(a, &t.data[A][m][k], 4);
        std::memcpy(b, &t.data[B][k][n], 4);
        even = __builtin_fmaf(to_float(a[0]), to_float(b[0]), even);
        odd = __builtin_fmaf(to_float(a[1]), to_float(b[1]), odd);
      }
      t.data[C][m][n] += even + odd;
    }
}

// C is int32, A has signed bytes and B unsigned ones.
template <int C, int A, int B>
void dot_bytes() {
  check_shapes(C, A, B);
  Tiles& t = tiles();
  for (int m = 0; m < t.shapes.rows[C]; m++)
    for (int n = 0; n < t.shapes.row_bytes[C] / 4; n++) {
      int32_t sum;
      std::memcpy(&sum, &t.data[C][m][n], 4);
      for (int k = 0; k < t.shapes.row_bytes[A] / 4; k++) {
        int8_t a[4];
        uint8_t b[4];
        std::memcpy(a, &t.data[A][m][k], 4);
        std::memcpy(b, &t.data[B][k][n], 4);
        for (int i = 0; i < 4; i++) sum += a[i] * b[i];
      }
      std::memcpy(&t.data[C][m][n], &sum, 4);
    }
}

#else

// Asks the OS once for the permission of this process to use tiles (8 KB of state per thread).
inline bool permitted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of asm/prctl.h, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

inline void configure(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
inline void release() { asm volatile("tilerelease"); }  // otherwise every context switch saves the tiles

template <int T>
void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int T>
void load(const void* from, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(T) : "memory");
}

template <int T>
void store(void* to, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride_bytes), "i"(T) : "memory");
}

template <int C, int A, int B>
void dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

template <int C, int A, int B>
void dot_bytes() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace baton::amx
#endif
