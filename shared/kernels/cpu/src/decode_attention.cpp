// Decode attention: one new token of each sequence attends to all of its pages, or to those of its window.
//
// A task is a split of one sequence for a range of KV heads. The outer loop is over blocks of keys and the inner one
// over heads: with pages [head][token][dim] that reads whole pages, one after the other.
#include "attention_strips.h"
#include "decode_blocks.h"
#include "decode_strips.h"

namespace baton::decode {
namespace {

// The states of all heads in each split of a batch.
struct Splits {
  Splits(const Call& call, int64_t num)
      : dim(call.padded_dim()), num_heads(call.heads.num), size(States::num_floats(num_heads, dim)),
        floats(num * size) {}
  States of(int64_t split) const { return States::in(floats.data + split * size, num_heads, dim); }

  int64_t dim, num_heads, size;
  CacheLines<float> floats;
};

// Merges the splits of a sequence into its result. It overwrites the first one.
void finish(const Call& call, const Splits& splits, int64_t b, int64_t first_split, int64_t num_splits,
            int64_t first_head, int64_t end_head) {
  for (int64_t head = first_head; head < end_head; head++) {
    const States whole = splits.of(first_split).from(head);
    for (int64_t i = 1; i < num_splits; i++) merge(whole, splits.of(first_split + i).from(head));
    bf16* const out = call.out + (b * call.heads.num + head) * call.kv.head_dim;
    store_result(whole, call.kv.head_dim, call.heads.sink(head), out);
  }
}

// A head's keys and values are prefetched while those of the head before are read.
template <class Strips>
void work_off(const Call& call, Blocks& blocks, const Splits& splits, const std::vector<int64_t>& num_splits) {
  const int64_t head_dim = call.kv.head_dim, dim = call.padded_dim();
  const Floats scale = floats(score_scale(head_dim));
  const CacheLines<typename Strips::Factor> q(call.heads.num * dim);  // of the task's sequence
  Strips strips(head_dim);
  KeyReader reader(call.kv);
  for (;;) {
    const Block& block = blocks.next();
    if (!block.task) return;
    const Task& task = *block.task;
    const int64_t first_head = task.first_head * call.group, end_head = task.end_head * call.group;
    const States states = splits.of(task.split);
    if (block.is_first) {
      states.from(first_head).clear(end_head - first_head);
      if (dim > head_dim) std::fill_n(q.data, call.heads.num * dim, 0);
      for (int64_t head = first_head; head < end_head; head++)
        copy_row(q.data + head * dim, call.q + (task.b * call.heads.num + head) * head_dim, head_dim);
    }
    const Block& next = blocks.ahead();
    for (int64_t kv_head = task.first_head; kv_head < task.end_head; kv_head++) {
      const KeyBlock now = call.block(kv_head, block.keys);
      if (kv_head + 1 < task.end_head) reader.give(strips, now, call.block(kv_head + 1, block.keys));
      else reader.give(strips, now, next.task ? call.block(next.task->first_head, next.keys) : now);
      const int64_t head = kv_head * call.group;
      add_block(strips, q.data + head * dim, call.group, scale, reader.scales(), states.from(head),
                [&](int64_t) { return block.visible; });
    }
    if (block.is_last && num_splits[task.b] == 1) finish(call, splits, task.b, task.split, 1, first_head, end_head);
  }
}

template <class Strips>
void attend(Team& team, const Call& call) {
  const int64_t batch = call.sequences.num, kv_heads = call.kv.num_kv_heads;
  std::vector<int64_t> num_splits, first_split;
  int64_t total_splits = 0;
  for (int64_t b = 0; b < batch; b++) {
    first_split.push_back(total_splits);
    num_splits.push_back((call.context(b) + kSplit - 1) / kSplit - call.first_split(b));
    total_splits += num_splits[b];
  }

  // Heads are independent, so where there are few splits their heads are separate tasks.
  const int64_t wanted = team.size() == 1 ? 1 : 4 * team.size();
  const int64_t shares = std::min(kv_heads, (wanted + total_splits - 1) / std::max<int64_t>(total_splits, 1));
  std::vector<Task> tasks;
  for (int64_t b = 0; b < batch; b++)
    for (int64_t i = 0; i < num_splits[b]; i++) {
      const int64_t key = (call.first_split(b) + i) * kSplit;
      const int64_t begin = std::max(key, call.first_key(b)), end = std::min(key + kSplit, call.context(b));
      for (int64_t share = 0; share < shares; share++)
        tasks.push_back({b, first_split[b] + i, begin, end, share * kv_heads / shares,
                         (share + 1) * kv_heads / shares});
    }

  const Splits splits(call, total_splits);
  std::atomic<size_t> next_task{0};
  team.run([&](int) {
    Blocks blocks(call, tasks, next_task);
    work_off<Strips>(call, blocks, splits, num_splits);
  });
  std::vector<int64_t> to_merge;
  for (int64_t b = 0; b < batch; b++)
    if (num_splits[b] > 1) to_merge.push_back(b);
  team.each(int64_t(to_merge.size()), [&](int64_t i) {
    const int64_t b = to_merge[i];
    finish(call, splits, b, first_split[b], num_splits[b], 0, call.heads.num);
  });
}

template <class Bytes>
void attend_by_heads(Team& team, const Call& call) {
  switch (call.kv.head_dim) {
    case 64: return attend<HeadStrips<64, Bytes>>(team, call);
    case 128: return attend<HeadStrips<128, Bytes>>(team, call);
    default: return attend<HeadStrips<0, Bytes>>(team, call);
  }
}

}  // namespace
}  // namespace baton::decode

namespace baton {

void decode_attention(Team& team, const bf16* q, const KVPages& kv, const Sequences& sequences,
                      const QueryHeads& heads, bf16* out) {
  const decode::Call call(q, kv, sequences, heads, out);
#ifdef BATON_HAS_AMX
  if (amx::permitted()) return decode::attend<TileStrips>(team, call);
#endif
#ifdef BATON_HAS_CODE_BYTES
  if (kv.has_codes) return decode::attend_by_heads<CodeBytes>(team, call);
#endif
  decode::attend_by_heads<void>(team, call);
}

}  // namespace baton

extern "C" void baton_decode_attention(void* team, const uint16_t* q, char* k_pages, char* v_pages,
                                       int64_t page_size, int64_t num_kv_heads, int64_t head_dim, int64_t has_codes,
                                       int64_t num_sequences, const int32_t* page_table, int64_t table_stride,
                                       const int64_t* starts, const int64_t* lengths, int64_t num_heads,
                                       int64_t window, const float* sinks, uint16_t* out) {
  const baton::KVPages kv{k_pages, v_pages, page_size, num_kv_heads, head_dim, has_codes != 0};
  const baton::Sequences sequences{num_sequences, page_table, table_stride, starts, lengths};
  baton::decode_attention(*static_cast<baton::Team*>(team), q, kv, sequences, {num_heads, window, sinks}, out);
}
