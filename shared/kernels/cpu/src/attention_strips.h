// Products of attention for a strip of rows and a packed block of keys. A row is a query head of a token.
//
// The products of a row are summed in one order for any number of rows, so they do not depend on the strip.
#pragma once
#include <type_traits>

#include "amx.h"
#include "attention_keys.h"

namespace baton {

// Strips of up to 6 rows in vectors. The products are functions of their own, so that they have all registers.
class VectorStrips {
 public:
  using Factor = baton::Factor;
  static constexpr int64_t kHeight = 6;
  static constexpr bool kTakesCodes = false;

  explicit VectorStrips(int64_t head_dim)
      : head_dim_(head_dim), dim_(32 * num_chunks(head_dim)), keys_(dim_) {}

  void take(const KeyBlock& block, const KeyBlock& next) { keys_.pack(block, next, head_dim_); }

  // products [row][lane] = q k^T
  void multiply_keys(int64_t rows, const Factor* q, float* products) {
    with_rows(rows, [&](auto num) {
      constexpr int N = vectors_at_once(num);
      for (int64_t lane = 0; lane < kKeys; lane += 16 * N)
        multiply_keys_of<num, N>(q, keys_.k.data + kFactors<Factor> * lane, dim_, products + lane);
    });
  }

  // sums [row][dim] += weights v, over the first num_lanes lanes
  void add_values(int64_t rows, const Factor* weights, int64_t num_lanes, float* sums) {
    with_rows(rows, [&](auto num) {
      constexpr int N = vectors_at_once(num);
      int64_t d = 0;
      for (; d + 16 * N <= dim_; d += 16 * N) add_values_of<num, N>(weights, keys_.v.data, num_lanes, dim_, d, sums);
      if (d < dim_) add_values_of<num, 2>(weights, keys_.v.data, num_lanes, dim_, d, sums);
    });
  }

 private:
  template <class F>
  static void with_rows(int64_t rows, F&& f) {
    switch (rows) {
      case 1: return f(std::integral_constant<int, 1>());
      case 2: return f(std::integral_constant<int, 2>());
      case 3: return f(std::integral_constant<int, 3>());
      case 4: return f(std::integral_constant<int, 4>());
      case 5: return f(std::integral_constant<int, 5>());
      default: return f(std::integral_constant<int, 6>());
    }
  }

  template <int R, int N>
  [[gnu::noinline]] static void multiply_keys_of(const Factor* q, const Factor* k, int64_t dim, float* products) {
    Floats sums[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) sums[r][i] = floats(0.0f);
    for (int64_t d = 0; d < dim; d += kFactors<Factor>)
      add_products<R, N>(q + d, dim, k + d * kKeys, sums);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) store(products + r * kKeys + 16 * i, sums[r][i]);
  }

  template <int R, int N>
  [[gnu::noinline]] static void add_values_of(const Factor* weights, const Factor* v, int64_t num_lanes, int64_t dim,
                                              int64_t first, float* sums) {
    Floats x[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) x[r][i] = load_floats(sums + r * dim + first + 16 * i);
    for (int64_t lane = 0; lane < num_lanes; lane += kFactors<Factor>)
      add_products<R, N>(weights + lane, kKeys, v + lane * dim + kFactors<Factor> * first, x);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) store(sums + r * dim + first + 16 * i, x[r][i]);
  }

  // sums [row] += the factors of 32 bits at a, one of each row of a_stride, times N vectors at b.
  template <int R, int N>
  [[gnu::always_inline]] static void add_products(const Factor* a, int64_t a_stride, const Factor* b,
                                                  Floats (&sums)[R][N]) {
    decltype(load_factors(b)) vectors[N];
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) vectors[i] = load_factors(b + kFactors<Factor> * 16 * i);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const auto factors = repeat_factors(a + r * a_stride);
#pragma GCC unroll 4
      for (int i = 0; i < N; i++) sums[r][i] = dot(sums[r][i], factors, vectors[i]);
    }
  }

  const int64_t head_dim_, dim_;
  const PackedKeys<Factor> keys_;
};

#ifdef BATON_HAS_AMX
// Strips of up to 32 rows with AMX: one or two tiles of rows by two tiles of 16 columns. Rows that a strip lacks are
// not in its tiles.
class TileStrips {
 public:
  using Factor = bf16;
  static constexpr int64_t kHeight = 32;
  static constexpr bool kTakesCodes = false;

  explicit TileStrips(int64_t head_dim) : head_dim_(head_dim), dim_(32 * num_chunks(head_dim)), keys_(dim_) {}
  ~TileStrips() { amx::release(); }
  TileStrips(const TileStrips&) = delete;
  TileStrips& operator=(const TileStrips&) = delete;

  void take(const KeyBlock& block, const KeyBlock& next) { keys_.pack(block, next, head_dim_); }

  void multiply_keys(int64_t rows, const bf16* q, float* products) {
    configure(rows);
    for (int64_t lane = 0; lane < kKeys; lane += 32) {
      amx::zero<0>(), amx::zero<1>();
      if (rows > 16) amx::zero<2>(), amx::zero<3>();
      for (int64_t d = 0; d < dim_; d += 32)
        multiply(rows, q + d, dim_, keys_.k.data + (d / 2 * kKeys + lane) * 2, kKeys);
      store_sums(rows, products + lane, kKeys);
    }
  }

  void add_values(int64_t rows, const bf16* weights, int64_t num_lanes, float* sums) {
    configure(rows);
    for (int64_t d = 0; d < dim_; d += 32) {
      float* x = sums + d;
      amx::load<0>(x, 4 * dim_), amx::load<1>(x + 16, 4 * dim_);
      if (rows > 16) amx::load<2>(x + 16 * dim_, 4 * dim_), amx::load<3>(x + 16 * dim_ + 16, 4 * dim_);
      for (int64_t lane = 0; lane < num_lanes; lane += 32)
        multiply(rows, weights + lane, kKeys, keys_.v.data + lane * dim_ + 2 * d, dim_);
      store_sums(rows, x, dim_);
    }
  }

 private:
  void configure(int64_t rows) {
    if (rows == configured_) return;
    configured_ = rows;
    amx::Shapes shapes;
    for (int tile : {0, 1, 4}) shapes.set(tile, int(std::min<int64_t>(rows, 16)));
    if (rows > 16)
      for (int tile : {2, 3, 5}) shapes.set(tile, int(rows - 16));
    for (int tile : {6, 7}) shapes.set(tile, 16);
    amx::configure(shapes);
  }

  // Tiles 0 to 3 += a [rows][32] (rows of a_stride) times b [16][32][2] (rows of b_stride pairs).
  static void multiply(int64_t rows, const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride) {
    amx::load<4>(a, 2 * a_stride), amx::load<6>(b, 4 * b_stride), amx::load<7>(b + 32, 4 * b_stride);
    amx::dot<0, 4, 6>(), amx::dot<1, 4, 7>();
    if (rows <= 16) return;
    amx::load<5>(a + 16 * a_stride, 2 * a_stride);
    amx::dot<2, 5, 6>(), amx::dot<3, 5, 7>();
  }

  static void store_sums(int64_t rows, float* to, int64_t stride) {
    amx::store<0>(to, 4 * stride), amx::store<1>(to + 16, 4 * stride);
    if (rows > 16) amx::store<2>(to + 16 * stride, 4 * stride), amx::store<3>(to + 16 * stride + 16, 4 * stride);
  }

  const int64_t head_dim_, dim_;
  const PackedKeys<bf16> keys_;
  int64_t configured_ = 0;
};
#endif

}  // namespace baton
