// The work of decode attention in order: tasks and blocks of keys.
#pragma once
#include <atomic>
#include <vector>

#include "attention_state.h"

namespace baton::decode {

struct Call {
  Call(const bf16* q, const KVPages& kv, const Sequences& sequences, const QueryHeads& heads, bf16* out)
      : q(q), kv(kv), sequences(sequences), heads(heads), group(heads.num / kv.num_kv_heads), out(out) {}

  const bf16* const q;
  const KVPages kv;
  const Sequences sequences;
  const QueryHeads heads;
  const int64_t group;
  bf16* const out;

  int64_t context(int64_t b) const { return sequences.starts[b] + sequences.lengths[b]; }
  int64_t first_key(int64_t b) const { return heads.first_key(context(b) - 1); }
  int64_t first_split(int64_t b) const { return first_key(b) / kSplit; }
  const int32_t* pages(int64_t b) const { return sequences.page_table + b * sequences.table_stride; }
  KeyBlock block(int64_t kv_head, const KeyRows& keys) const {
    const int64_t offset = kv_head * kv.head_nbytes();
    return {kv.k + offset, kv.v + offset, &keys};
  }
  int64_t padded_dim() const { return 32 * num_chunks(kv.head_dim); }
};

// A part of one sequence, tokens [begin, end), for KV heads [first_head, end_head).
struct Task {
  int64_t b, split, begin, end, first_head, end_head;
};

struct Block {
  const Task* task = nullptr;  // null after the last block
  KeyRows keys;
  Visible visible = {};
  bool is_first = false, is_last = false;  // block of its task
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
      if (task_) first_ = task_->begin / kKeys * kKeys;
    }
    block.task = task_;
    if (!task_) return;
    block.is_first = first_ <= task_->begin;
    block.keys.find(call_.kv, call_.pages(task_->b), first_, task_->begin, task_->end);
    block.visible = {task_->begin - first_, task_->end - first_};
    block.is_last = (first_ += kKeys) >= task_->end;
  }

  const Call& call_;
  const std::vector<Task>& tasks_;
  std::atomic<size_t>& next_task_;
  const Task* task_ = nullptr;
  int64_t first_ = 0, taken_ = 0;
  Block blocks_[2];
};

}  // namespace baton::decode
