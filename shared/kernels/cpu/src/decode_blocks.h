// The work of decode attention in order: tasks and blocks of tokens, and the rows to prefetch.
#pragma once
#include <atomic>
#include <vector>

#include "attention_rows.h"

namespace baton::decode {

constexpr int64_t kSplit = 512;
constexpr int64_t kBlock = 128;

struct Call {
  Call(const bf16* q, const KVPages& kv, const Sequences& sequences, int64_t num_heads, bf16* out)
      : q(q), kv(kv), sequences(sequences), num_heads(num_heads), group(num_heads / kv.num_kv_heads), out(out) {}

  const bf16* const q;
  const KVPages kv;
  const Sequences sequences;
  const int64_t num_heads, group;
  bf16* const out;

  int64_t context(int64_t b) const { return sequences.starts[b] + sequences.lengths[b]; }
  const int32_t* pages(int64_t b) const { return sequences.page_table + b * sequences.table_stride; }
  const bf16* k(int64_t kv_head) const { return kv.k + kv_head * kv.page_size * kv.head_dim; }
  const bf16* v(int64_t kv_head) const { return kv.v + kv_head * kv.page_size * kv.head_dim; }
  int64_t sums_size() const { return 32 * num_chunks(kv.head_dim); }
};

// A part of one sequence, tokens [first, end), for KV heads [first_head, end_head).
struct Task {
  int64_t b, split, first, end, first_head, end_head;
};

// Up to kBlock tokens of a task, and the offsets of their rows (find_rows). The last offset is repeated up to a
// multiple of 16.
//
// A row of each run of 16 tokens is read in turn. With pages of 16 tokens that reads up to eight pages at once. The
// hardware prefetches memory that is read in streams, and several streams hide the time that each takes to start
// (pages of 24 KB in random order, Zen 4: 15 GB/s one by one, 26 GB/s eight at once).
struct Block {
  const Task* task = nullptr;  // null after the last block
  int64_t rows[kBlock];
  int64_t count = 0;
  bool is_first = false, is_last = false;  // block of its task

  void fill(const Call& call, const Task& of, int64_t first) {
    task = &of, is_first = first == of.first, is_last = first + kBlock >= of.end;
    count = std::min(of.end - first, kBlock);
    int64_t in_order[kBlock];
    find_rows(call.kv, call.pages(of.b), first, count, in_order);
    const int64_t runs = count / 16;
    for (int64_t i = 0; i < 16; i++)
      for (int64_t run = 0; run < runs; run++) rows[i * runs + run] = in_order[run * 16 + i];
    for (int64_t i = runs * 16; i < (count + 15) / 16 * 16; i++) rows[i] = in_order[std::min(i, count - 1)];
  }
};

// The blocks of one worker in order. A task is claimed one block early, so that its rows can be prefetched.
class Blocks {
 public:
  Blocks(const Call& call, const std::vector<Task>& tasks, std::atomic<size_t>& next_task)
      : call_(call), tasks_(tasks), next_task_(next_task) {
    fill(blocks_[0]);
  }
  // The next block. It is valid until the next call.
  const Block& next() {
    const Block& block = blocks_[taken_++ % 2];
    if (block.task) fill(blocks_[taken_ % 2]);
    return block;
  }
  // The block that next() will return.
  const Block& ahead() const { return blocks_[taken_ % 2]; }

 private:
  void fill(Block& block) {
    if (!task_ || first_ >= task_->end) {
      const size_t i = next_task_.fetch_add(1, std::memory_order_relaxed);
      task_ = i < tasks_.size() ? &tasks_[i] : nullptr;
      if (task_) first_ = task_->first;
    }
    block.task = nullptr;
    if (!task_) return;
    block.fill(call_, *task_, first_);
    first_ += kBlock;
  }

  const Call& call_;
  const std::vector<Task>& tasks_;
  std::atomic<size_t>& next_task_;
  const Task* task_ = nullptr;
  int64_t first_ = 0, taken_ = 0;
  Block blocks_[2];
};

// Prefetches the rows that are read next into the L2 cache.
struct Ahead {
  const bf16* values = nullptr;
  const int64_t* rows = nullptr;
  int64_t count = 0;

  Ahead() = default;
  Ahead(const bf16* values, const Block& block) : values(values), rows(block.rows), count(block.count) {}

  // Always inlined, since GCC removes calls of functions that only prefetch.
  [[gnu::always_inline]] void fetch(int64_t i, int64_t head_dim) const {
    if (i >= count) return;
    const bf16* row = values + rows[i];
    for (int64_t d = 0; d < head_dim; d += 32) _mm_prefetch(row + d, _MM_HINT_T1);
  }
};

}  // namespace baton::decode
