// Extend attention: the new tokens of each sequence attend to its cached prefix and causally to themselves.
//
// A task is a block of query tokens of one KV head of one sequence; its rows are (token, query head) pairs, taken in
// strips as high as the registers allow. Key blocks begin at multiples of kKeys from the start of the sequence, and a
// row sums over them in that order, whatever strip, task or chunk of its prompt it is in: its result does not depend
// on them. Keys a row must not see have weight zero, and a key block is packed once for all rows of a task: K by pairs
// of dims with keys as lanes, V by pairs of keys with dims as lanes. Both are also what AMX takes.
#include <atomic>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "attention_rows.h"

namespace baton {
namespace {

constexpr int64_t kKeys = 64;
constexpr int64_t kRows = 192;  // of a task; whole strips of any height below

struct Call {
  const bf16* q;
  KVPages kv;
  Sequences sequences;
  int64_t num_heads;
  bf16* out;

  int64_t group() const { return num_heads / kv.num_kv_heads; }
  int64_t padded_dim() const { return 32 * num_chunks(kv.head_dim); }
  const int32_t* pages(int64_t b) const { return sequences.page_table + b * sequences.table_stride; }
};

// Query tokens [first, end) of sequence b, counted from its first new one, for one KV head.
struct Task {
  int64_t b, kv_head, first, end;
  int64_t row_of_q;  // of the sequence's first new token
};

// What a worker keeps while it is busy with a task.
struct Workspace {
  explicit Workspace(int64_t dim)
      : q(kRows * dim), k(kKeys * dim), v(kKeys * dim), sums(kRows * dim), scores(kRows * kKeys),
        weights(kRows * kKeys) {}

  Scratch<bf16> q;      // [rows][dim]
  Scratch<bf16> k;      // [dim / 2][keys][2]
  Scratch<bf16> v;      // [keys / 2][dim][2], dims of a chunk as interleave leaves them
  Scratch<float> sums;  // [rows][dim], dims like v
  Scratch<float> scores;   // [strip][keys]
  Scratch<bf16> weights;   // [strip][keys]
  float total[kRows], maximum[kRows], shrink[kRows];
};

// Keys [first, first + count) of a sequence; zeros behind them, whatever an earlier owner of the page left there.
void pack_keys(const Call& call, const Task& task, int64_t first, int64_t count, Workspace& work) {
  const int64_t head_dim = call.kv.head_dim, dim = call.padded_dim();
  int64_t rows[kKeys];
  find_rows(call.kv, call.pages(task.b), first, count, rows);
  const int64_t head = task.kv_head * call.kv.page_size * head_dim;
  const bf16 *k = call.kv.k + head, *v = call.kv.v + head;
  auto load = [&](const bf16* from, int64_t key, int64_t chunk) {
    return key < count ? load_chunk(from + rows[key], chunk, head_dim) : _mm512_setzero_si512();
  };
  for (int64_t chunk = 0; chunk < num_chunks(head_dim); chunk++) {
    for (int64_t key = 0; key < kKeys; key += 16) {
      __m512i square[16];
      for (int i = 0; i < 16; i++) square[i] = load(k, key + i, chunk);
      transpose(square);
      for (int i = 0; i < 16; i++) _mm512_store_si512(work.k.data + ((16 * chunk + i) * kKeys + key) * 2, square[i]);
    }
    for (int64_t key = 0; key < kKeys; key += 2) {
      const __m512i even = load(v, key, chunk), odd = load(v, key + 1, chunk);
      bf16* to = work.v.data + key * dim + 64 * chunk;
      _mm512_store_si512(to, interleave_low(even, odd));
      _mm512_store_si512(to + 32, interleave_high(even, odd));
    }
  }
}

// Products of a strip of 6 rows in registers.
struct VectorStrip {
  static constexpr int64_t kHeight = 6;

  static int32_t pair(const bf16* from) {
    int32_t value;
    std::memcpy(&value, from, 4);
    return value;
  }

  // scores [row][key] = q k^T
  static void multiply_keys(const bf16* q, const bf16* k, int64_t dim, float* scores) {
    __m512 sums[kHeight][kKeys / 16];
    for (auto& row : sums)
      for (auto& sum : row) sum = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim / 2; d++) {
      __m512i keys[kKeys / 16];
      for (int i = 0; i < kKeys / 16; i++) keys[i] = _mm512_load_si512(k + (d * kKeys + 16 * i) * 2);
#pragma GCC unroll 8
      for (int r = 0; r < kHeight; r++) {
        const __m512i query = _mm512_set1_epi32(pair(q + r * dim + 2 * d));
        for (int i = 0; i < kKeys / 16; i++) sums[r][i] = dot_pairs(sums[r][i], query, keys[i]);
      }
    }
    for (int r = 0; r < kHeight; r++)
      for (int i = 0; i < kKeys / 16; i++) _mm512_store_ps(scores + r * kKeys + 16 * i, sums[r][i]);
  }

  // sums [row][dim] = sums * shrink + weights v, over the first num_keys keys
  static void add_values(const bf16* weights, const bf16* v, int64_t num_keys, int64_t dim, const float* shrink,
                         float* sums) {
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) add_values_of<4>(weights, v, num_keys, dim, d, shrink, sums);
    if (d < dim) add_values_of<2>(weights, v, num_keys, dim, d, shrink, sums);
  }

  template <int N>
  static void add_values_of(const bf16* weights, const bf16* v, int64_t num_keys, int64_t dim, int64_t first,
                            const float* shrink, float* sums) {
    __m512 x[kHeight][N];
    for (int r = 0; r < kHeight; r++)
      for (int i = 0; i < N; i++)
        x[r][i] = _mm512_mul_ps(_mm512_load_ps(sums + r * dim + first + 16 * i), _mm512_set1_ps(shrink[r]));
    for (int64_t key = 0; key < num_keys; key += 2) {
      __m512i values[N];
      for (int i = 0; i < N; i++) values[i] = _mm512_load_si512(v + key * dim + (first + 16 * i) * 2);
#pragma GCC unroll 8
      for (int r = 0; r < kHeight; r++) {
        const __m512i weight = _mm512_set1_epi32(pair(weights + r * kKeys + key));
        for (int i = 0; i < N; i++) x[r][i] = dot_pairs(x[r][i], weight, values[i]);
      }
    }
    for (int r = 0; r < kHeight; r++)
      for (int i = 0; i < N; i++) _mm512_store_ps(sums + r * dim + first + 16 * i, x[r][i]);
  }
};

#ifdef BATON_HAS_AMX
// The same by AMX: two by two tiles of 16 rows and 16 columns.
struct TileStrip {
  static constexpr int64_t kHeight = 32;

  static void multiply_keys(const bf16* q, const bf16* k, int64_t dim, float* scores) {
    for (int64_t key = 0; key < kKeys; key += 32) {
      amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
      for (int64_t d = 0; d < dim; d += 32) {
        const bf16* keys = k + (d / 2 * kKeys + key) * 2;
        multiply(q + d, dim, keys, kKeys);
      }
      store_sums(scores + key, kKeys);
    }
  }

  static void add_values(const bf16* weights, const bf16* v, int64_t num_keys, int64_t dim, const float* shrink,
                         float* sums) {
    for (int64_t r = 0; r < kHeight; r++)
      for (int64_t d = 0; d < dim; d += 16) {
        float* x = sums + r * dim + d;
        _mm512_store_ps(x, _mm512_mul_ps(_mm512_load_ps(x), _mm512_set1_ps(shrink[r])));
      }
    for (int64_t d = 0; d < dim; d += 32) {
      float* x = sums + d;
      amx::load<0>(x, 4 * dim), amx::load<1>(x + 16, 4 * dim);
      amx::load<2>(x + 16 * dim, 4 * dim), amx::load<3>(x + 16 * dim + 16, 4 * dim);
      for (int64_t key = 0; key < num_keys; key += 32) multiply(weights + key, kKeys, v + key * dim + 2 * d, dim);
      store_sums(x, dim);
    }
  }

 private:
  // Tiles 0 to 3 += a [32][32] (rows of a_stride) times b [16][32][2] (rows of b_stride pairs).
  static void multiply(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride) {
    amx::load<4>(a, 2 * a_stride), amx::load<5>(a + 16 * a_stride, 2 * a_stride);
    amx::load<6>(b, 4 * b_stride), amx::load<7>(b + 32, 4 * b_stride);
    amx::dot<0, 4, 6>(), amx::dot<1, 4, 7>(), amx::dot<2, 5, 6>(), amx::dot<3, 5, 7>();
  }

  static void store_sums(float* to, int64_t stride) {
    amx::store<0>(to, 4 * stride), amx::store<1>(to + 16, 4 * stride);
    amx::store<2>(to + 16 * stride, 4 * stride), amx::store<3>(to + 16 * stride + 16, 4 * stride);
  }
};
#endif

// One row of scores over keys [0, visible) of a block becomes weights, and `shrink` what the sums so far are worth.
inline void softmax_row(const float* scores, int64_t visible, __m512 scale, float& total, float& maximum,
                        float& shrink, bf16* weights) {
  constexpr int kParts = kKeys / 16;
  __m512 x[kParts], highest = _mm512_set1_ps(kNoScore);
  for (int i = 0; i < kParts; i++) {
    x[i] = _mm512_mul_ps(_mm512_load_ps(scores + 16 * i), scale);
    highest = _mm512_mask_max_ps(highest, lanes_before(visible - 16 * i), highest, x[i]);
  }
  const float before = maximum;
  maximum = std::max(before, _mm512_reduce_max_ps(highest));
  shrink = exp2_one(before - maximum);
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < kParts; i++) {
    const __m512 power = exp2_16(_mm512_sub_ps(x[i], _mm512_set1_ps(maximum)));
    const __m512 weight = _mm512_maskz_mov_ps(lanes_before(visible - 16 * i), power);
    sum = _mm512_add_ps(sum, weight);
    store16(weights + 16 * i, weight);
  }
  total = total * shrink + _mm512_reduce_add_ps(sum);
}

template <class Strip>
void attend(const Call& call, const Task& task, Workspace& work) {
  constexpr int64_t kHeight = Strip::kHeight;
  static_assert(kRows % kHeight == 0);
  const int64_t head_dim = call.kv.head_dim, dim = call.padded_dim(), group = call.group();
  const int64_t num_rows = (task.end - task.first) * group, start = call.sequences.starts[task.b];
  const int64_t padded_rows = (num_rows + kHeight - 1) / kHeight * kHeight;
  auto offset = [&](int64_t row) {  // in q and in out
    const int64_t token = task.row_of_q + task.first + row / group, head = task.kv_head * group + row % group;
    return (token * call.num_heads + head) * head_dim;
  };
  auto position = [&](int64_t row) { return start + task.first + row / group; };

  std::memset(work.q.data, 0, size_t(padded_rows * dim) * sizeof(bf16));
  for (int64_t row = 0; row < num_rows; row++)
    std::memcpy(work.q.data + row * dim, call.q + offset(row), size_t(head_dim) * sizeof(bf16));
  std::fill(work.sums.data, work.sums.data + padded_rows * dim, 0.0f);
  std::fill(work.weights.data, work.weights.data + kHeight * kKeys, bf16(0));
  std::fill(work.total, work.total + padded_rows, 0.0f);
  std::fill(work.maximum, work.maximum + padded_rows, kNoScore);

  const __m512 scale = _mm512_set1_ps(score_scale(head_dim));
  const int64_t num_keys = start + call.sequences.lengths[task.b], end = start + task.end;
  for (int64_t key = 0; key < end; key += kKeys) {
    pack_keys(call, task, key, std::min(kKeys, num_keys - key), work);
    for (int64_t first = 0; first < num_rows; first += kHeight) {
      const int64_t end_row = std::min(first + kHeight, num_rows);
      const int64_t visible = std::min(position(end_row - 1) + 1 - key, kKeys);
      if (visible <= 0) continue;
      Strip::multiply_keys(work.q.data + first * dim, work.k.data, dim, work.scores.data);
      for (int64_t row = first; row < end_row; row++)
        softmax_row(work.scores.data + (row - first) * kKeys, position(row) + 1 - key, scale, work.total[row],
                    work.maximum[row], work.shrink[row], work.weights.data + (row - first) * kKeys);
      std::fill(work.shrink + end_row, work.shrink + first + kHeight, 0.0f);
      Strip::add_values(work.weights.data, work.v.data, visible, dim, work.shrink + first,
                        work.sums.data + first * dim);
    }
  }
  for (int64_t row = 0; row < num_rows; row++)
    for (int64_t c = 0; c < dim / 32; c++) {
      const float* sums = work.sums.data + row * dim + 32 * c;
      const __m512 factor = _mm512_set1_ps(1.0f / work.total[row]);
      store_chunk(call.out + offset(row), c, head_dim, _mm512_load_ps(sums), _mm512_load_ps(sums + 16), factor);
    }
}

// Longest first, so that no worker begins a long one when the others are done.
std::vector<Task> plan(const Call& call, int team_size) {
  std::vector<Task> tasks;
  int64_t num_tokens = 0;
  for (int64_t b = 0; b < call.sequences.num; b++) num_tokens += call.sequences.lengths[b];
  const int64_t shares = 4 * team_size;
  int64_t block = std::max<int64_t>(kRows / call.group(), 1);
  if (team_size > 1)
    block = std::clamp(num_tokens * call.kv.num_kv_heads / shares, std::min<int64_t>(block, 32), block);
  for (int64_t b = 0, row = 0; b < call.sequences.num; row += call.sequences.lengths[b++])
    for (int64_t end = call.sequences.lengths[b]; end > 0; end -= block)
      for (int64_t kv_head = 0; kv_head < call.kv.num_kv_heads; kv_head++)
        tasks.push_back({b, kv_head, std::max<int64_t>(end - block, 0), end, row});
  std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& x, const Task& y) {
    return call.sequences.starts[x.b] + x.end > call.sequences.starts[y.b] + y.end;
  });
  return tasks;
}

template <class Strip>
void attend_all(Team& team, const Call& call) {
  const std::vector<Task> tasks = plan(call, team.size());
  std::atomic<size_t> next{0};
  team.run([&](int) {
    Workspace work(call.padded_dim());
#ifdef BATON_HAS_AMX
    if (std::is_same_v<Strip, TileStrip>) {
      amx::Shapes shapes;
      for (int tile = 0; tile < 8; tile++) shapes.set(tile, 16);
      amx::configure(shapes);
    }
#endif
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks.size();)
      attend<Strip>(call, tasks[i], work);
#ifdef BATON_HAS_AMX
    if (std::is_same_v<Strip, TileStrip>) amx::release();
#endif
  });
}

}  // namespace

void extend_attention(Team& team, const bf16* q, const KVPages& kv, const Sequences& sequences, int64_t num_heads,
                      bf16* out) {
  const Call call{q, kv, sequences, num_heads, out};
#ifdef BATON_HAS_AMX
  if (amx::permitted()) return attend_all<TileStrip>(team, call);
#endif
  attend_all<VectorStrip>(team, call);
}

}  // namespace baton

extern "C" void baton_extend_attention(void* team, const uint16_t* q, uint16_t* k_pages, uint16_t* v_pages,
                                       int64_t page_size, int64_t num_kv_heads, int64_t head_dim,
                                       int64_t num_sequences, const int32_t* page_table, int64_t table_stride,
                                       const int64_t* starts, const int64_t* lengths, int64_t num_heads,
                                       uint16_t* out) {
  const baton::KVPages kv{k_pages, v_pages, page_size, num_kv_heads, head_dim};
  const baton::Sequences sequences{num_sequences, page_table, table_stride, starts, lengths};
  baton::extend_attention(*static_cast<baton::Team*>(team), q, kv, sequences, num_heads, out);
}
