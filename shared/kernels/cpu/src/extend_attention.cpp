// Extend attention: the new tokens of each sequence attend to its cached prefix and causally to themselves.
//
// A task is a block of query tokens of one KV head of one sequence. Its rows are (token, query head) pairs, which are
// computed in strips as high as the registers allow. Key blocks begin at multiples of kKeys from the start of the
// sequence, and the sums of a row run over them in that order. So the result of a row does not depend on its strip,
// its task or its chunk of the prompt. Keys that a row must not see have weight zero. A key block is packed once for
// all rows of a task: K by pairs of dims with keys as lanes, V by pairs of keys with dims as lanes. AMX takes both as
// well.
#include <atomic>
#include <type_traits>
#include <vector>

#include "extend_strips.h"

namespace baton::extend {
namespace {

constexpr int64_t kRows = 384;  // rows of a task: whole strips of any height

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

// Query tokens [first, end) of sequence b, counted from its first new token, for one KV head.
struct Task {
  int64_t b, kv_head, first, end;
  int64_t row_of_q;  // row of q of the sequence's first new token
};

// A worker's arrays for one task.
struct Workspace {
  explicit Workspace(int64_t dim)
      : q(kRows * dim), k(kKeys * dim), v(kKeys * dim), sums(kRows * dim), products(kTallest * kKeys),
        weights(kTallest * kKeys) {}

  Scratch<bf16> q;          // [rows][dim]
  Scratch<bf16> k;          // [dim / 2][keys][2]
  Scratch<bf16> v;          // [keys / 2][dim][2], dims of a chunk in the order of interleave()
  Scratch<float> sums;      // [rows][dim], dims like v
  Scratch<float> products;  // [strip][keys], q . k
  Scratch<bf16> weights;    // [strip][keys]
  alignas(64) float totals[kRows * 16];
  float references[kRows];
};

// The addresses of K and V of a block of keys, for one KV head.
struct KeyRows {
  KeyRows(const Call& call, const Task& task, int64_t first, int64_t end)
      : k(call.kv.k + task.kv_head * call.kv.page_size * call.kv.head_dim),
        v(call.kv.v + task.kv_head * call.kv.page_size * call.kv.head_dim),
        count(std::clamp<int64_t>(end - first, 0, kKeys)) {
    find_rows(call.kv, call.pages(task.b), first, count, rows);
  }

  // Prefetches part i of n. Always inlined, since GCC removes calls of functions that only prefetch.
  [[gnu::always_inline]] void fetch(int64_t i, int64_t n, int64_t head_dim) const {
    for (int64_t key = count * i / n; key < count * (i + 1) / n; key++)
      for (int64_t d = 0; d < head_dim; d += 32) {
        _mm_prefetch(k + rows[key] + d, _MM_HINT_T0);
        _mm_prefetch(v + rows[key] + d, _MM_HINT_T0);
      }
  }

  const bf16 *k, *v;
  int64_t count;
  int64_t rows[kKeys];
};

// Zeros are written behind the last key, over the values of an earlier owner of the page.
void pack_keys(const KeyRows& keys, int64_t head_dim, Workspace& work) {
  const int64_t dim = 32 * num_chunks(head_dim);
  auto load = [&](const bf16* from, int64_t key, int64_t chunk) {
    return key < keys.count ? load_chunk(from + keys.rows[key], chunk, head_dim) : _mm512_setzero_si512();
  };
  for (int64_t chunk = 0; chunk < num_chunks(head_dim); chunk++) {
    for (int64_t key = 0; key < kKeys; key += 16) {
      __m512i square[16];
      for (int i = 0; i < 16; i++) square[i] = load(keys.k, key + i, chunk);
      transpose(square);
      for (int i = 0; i < 16; i++) _mm512_store_si512(work.k.data + ((16 * chunk + i) * kKeys + key) * 2, square[i]);
    }
    for (int64_t key = 0; key < kKeys; key += 2) {
      const __m512i even = load(keys.v, key, chunk), odd = load(keys.v, key + 1, chunk);
      bf16* to = work.v.data + key * dim + 64 * chunk;
      _mm512_store_si512(to, interleave_low(even, odd));
      _mm512_store_si512(to + 32, interleave_high(even, odd));
    }
  }
}

template <class Strip>
void attend(const Call& call, const Task& task, Workspace& work) {
  constexpr int64_t kHeight = Strip::kHeight;
  static_assert(kRows % kHeight == 0 && kHeight <= kTallest);
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
  std::fill(work.totals, work.totals + padded_rows * 16, 0.0f);
  std::fill(work.references, work.references + padded_rows, kNoScore);

  const __m512 scale = _mm512_set1_ps(score_scale(head_dim));
  const int64_t num_keys = start + call.sequences.lengths[task.b], end = start + task.end;
  KeyRows keys(call, task, 0, num_keys);
  for (int64_t key = 0; key < end; key += kKeys) {
    pack_keys(keys, head_dim, work);
    keys = KeyRows(call, task, key + kKeys, key + kKeys < end ? num_keys : 0);  // the next block
    for (int64_t first = 0; first < num_rows; first += kHeight) {
      keys.fetch(first / kHeight, padded_rows / kHeight, head_dim);
      const int64_t end_row = std::min(first + kHeight, num_rows);
      const int64_t visible = std::min(position(end_row - 1) + 1 - key, kKeys);
      if (visible <= 0) continue;
      Strip::multiply_keys(work.q.data + first * dim, work.k.data, dim, work.products.data);
      const bool sees_all = position(first) + 1 - key >= kKeys;
      for (int64_t i = first; i < end_row; i++) {
        const float* products = work.products.data + (i - first) * kKeys;
        bf16* weights = work.weights.data + (i - first) * kKeys;
        const Row row{work.totals + 16 * i, work.sums.data + i * dim, work.references[i]};
        if (sees_all) softmax_row<false>(products, kKeys, scale, dim, row, weights);
        else softmax_row<true>(products, position(i) + 1 - key, scale, dim, row, weights);
      }
      Strip::add_values(work.weights.data, work.v.data, visible, dim, work.sums.data + first * dim);
    }
  }
  for (int64_t row = 0; row < num_rows; row++) {
    const __m512 factor = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(_mm512_load_ps(work.totals + 16 * row)));
    for (int64_t c = 0; c < dim / 32; c++) {
      const float* sums = work.sums.data + row * dim + 32 * c;
      store_chunk(call.out + offset(row), c, head_dim, _mm512_load_ps(sums), _mm512_load_ps(sums + 16), factor);
    }
  }
}

// The longest tasks come first, so that no worker begins a long task when the others are done.
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
}  // namespace baton::extend

namespace baton {

void extend_attention(Team& team, const bf16* q, const KVPages& kv, const Sequences& sequences, int64_t num_heads,
                      bf16* out) {
  const extend::Call call{q, kv, sequences, num_heads, out};
#ifdef BATON_HAS_AMX
  if (amx::permitted()) return extend::attend_all<extend::TileStrip>(team, call);
#endif
  extend::attend_all<extend::VectorStrip>(team, call);
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
