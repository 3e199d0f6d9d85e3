// Extend attention: the new tokens of each sequence attend to its cached prefix and causally to themselves, or to what
// their windows leave of both.
//
// A task is a block of query tokens of one KV head of one sequence. Its rows are (token, query head) pairs, which are
// computed in strips as high as the registers allow.
#include <atomic>
#include <vector>

#include "attention_state.h"
#include "attention_strips.h"

namespace baton::extend {
namespace {

constexpr int64_t kRows = 384;  // rows of a task: whole strips of any height

struct Call {
  const bf16* q;
  KVPages kv;
  Sequences sequences;
  QueryHeads heads;
  bf16* out;

  int64_t group() const { return heads.num / kv.num_kv_heads; }
  int64_t padded_dim() const { return 32 * num_chunks(kv.head_dim); }
  const int32_t* pages(int64_t b) const { return sequences.page_table + b * sequences.table_stride; }
};

// Query tokens [first, end) of sequence b, counted from its first new token, for one KV head.
struct Task {
  int64_t b, kv_head, first, end;
  int64_t row_of_q;  // row of q of the sequence's first new token
};

// A worker's arrays for one task.
template <class Factor>
struct Workspace {
  explicit Workspace(int64_t dim)
      : q(kRows * dim), floats(2 * States::num_floats(kRows, dim)),
        split(States::in(floats.data, kRows, dim)),
        whole(States::in(floats.data + States::num_floats(kRows, dim), kRows, dim)) {}

  CacheLines<Factor> q;  // [rows][dim]
  CacheLines<float> floats;
  States split, whole;  // of the split that is computed, and of those before it
};

// Merges a row's split into those before it. `is_first` if the row sees no key before the split.
void end_split(const States& whole, const States& split, bool is_first) {
  if (!is_first) return merge(whole, split);
  std::copy_n(split.sums, split.dim, whole.sums);
  std::copy_n(split.totals, 16, whole.totals);
  *whole.references = *split.references;
}

template <class Strips>
void attend(const Call& call, const Task& task, Workspace<typename Strips::Factor>& work, Strips& strips,
            KeyReader& reader) {
  const int64_t head_dim = call.kv.head_dim, dim = call.padded_dim(), group = call.group();
  const int64_t num_rows = (task.end - task.first) * group, start = call.sequences.starts[task.b];
  auto head_of = [&](int64_t row) { return task.kv_head * group + row % group; };
  auto offset = [&](int64_t row) {  // in q and in out
    const int64_t token = task.row_of_q + task.first + row / group;
    return (token * call.heads.num + head_of(row)) * head_dim;
  };
  auto position = [&](int64_t row) { return start + task.first + row / group; };
  auto first_key = [&](int64_t row) { return call.heads.first_key(position(row)); };

  if (dim > head_dim) std::fill_n(work.q.data, num_rows * dim, 0);
  for (int64_t row = 0; row < num_rows; row++) copy_row(work.q.data + row * dim, call.q + offset(row), head_dim);
  work.split.clear(num_rows);

  const Floats scale = floats(score_scale(head_dim));
  const int64_t num_keys = start + call.sequences.lengths[task.b], begin = first_key(0), end = start + task.end;
  const int64_t head_offset = task.kv_head * call.kv.head_nbytes();
  const char *k = call.kv.k + head_offset, *v = call.kv.v + head_offset;
  KeyRows keys, next;
  int64_t key = begin / kKeys * kKeys;
  next.find(call.kv, call.pages(task.b), key, begin, num_keys);
  for (; key < end; key += kKeys) {
    if (key % kSplit == 0)
      for (int64_t row = std::max<int64_t>(key - start - task.first, 0) * group; row < num_rows; row++) {
        if (first_key(row) >= key) break;
        end_split(work.whole.from(row), work.split.from(row), first_key(row) >= key - kSplit);
        work.split.from(row).clear(1);
      }
    keys = next;
    next.find(call.kv, call.pages(task.b), key + kKeys, begin, key + kKeys < end ? num_keys : 0);
    reader.give(strips, {k, v, &keys}, {k, v, next.count > 0 ? &next : &keys});
    add_block(strips, work.q.data, num_rows, scale, reader.scales(), work.split,
              [&](int64_t row) { return Visible{first_key(row) - key, position(row) + 1 - key}; });
  }
  for (int64_t row = 0; row < num_rows; row++) {
    const bool has_splits = first_key(row) / kSplit < position(row) / kSplit;
    if (has_splits) merge(work.whole.from(row), work.split.from(row));
    const States& states = has_splits ? work.whole : work.split;
    store_result(states.from(row), head_dim, call.heads.sink(head_of(row)), call.out + offset(row));
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

template <class Strips>
void attend_all(Team& team, const Call& call) {
  const std::vector<Task> tasks = plan(call, team.size());
  std::atomic<size_t> next{0};
  team.run([&](int) {
    Workspace<typename Strips::Factor> work(call.padded_dim());
    Strips strips(call.kv.head_dim);
    KeyReader reader(call.kv);
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks.size();)
      attend(call, tasks[i], work, strips, reader);
  });
}

}  // namespace
}  // namespace baton::extend

namespace baton {

void extend_attention(Team& team, const bf16* q, const KVPages& kv, const Sequences& sequences,
                      const QueryHeads& heads, bf16* out) {
  const extend::Call call{q, kv, sequences, heads, out};
#ifdef BATON_HAS_AMX
  if (amx::permitted()) return extend::attend_all<TileStrips>(team, call);
#endif
  extend::attend_all<VectorStrips>(team, call);
}

}  // namespace baton

extern "C" void baton_extend_attention(void* team, const uint16_t* q, char* k_pages, char* v_pages,
                                       int64_t page_size, int64_t num_kv_heads, int64_t head_dim, int64_t has_codes,
                                       int64_t num_sequences, const int32_t* page_table, int64_t table_stride,
                                       const int64_t* starts, const int64_t* lengths, int64_t num_heads,
                                       int64_t window, const float* sinks, uint16_t* out) {
  const baton::KVPages kv{k_pages, v_pages, page_size, num_kv_heads, head_dim, has_codes != 0};
  const baton::Sequences sequences{num_sequences, page_table, table_stride, starts, lengths};
  baton::extend_attention(*static_cast<baton::Team*>(team), q, kv, sequences, {num_heads, window, sinks}, out);
}
