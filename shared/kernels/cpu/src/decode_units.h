// What decode attention works on, in order: tasks, blocks of tokens, units; and the rows to fetch ahead.
#pragma once
#include <atomic>
#include <vector>

#include "attention_rows.h"

namespace baton::decode {

constexpr int64_t kSplit = 512;
constexpr int64_t kBlock = 64;
constexpr int64_t kHeads = 4;  // query heads of one KV head that share the registers a row of V was loaded to

struct Call {
  const bf16* q;
  KVPages kv;
  Sequences sequences;
  int64_t num_heads;
  bf16* out;

  int64_t group() const { return num_heads / kv.num_kv_heads; }
  int64_t context(int64_t b) const { return sequences.starts[b] + sequences.lengths[b]; }
  const int32_t* pages(int64_t b) const { return sequences.page_table + b * sequences.table_stride; }
  int64_t head_offset(int64_t kv_head) const { return kv_head * kv.page_size * kv.head_dim; }
  int64_t sums_size() const { return 32 * num_chunks(kv.head_dim); }
};

// Where the rows of up to kBlock tokens of a sequence lie, as find_rows, filled up to a multiple of 16 with the last.
//
// A full block is read in turn from its four quarters, two rows at a time: with pages of 16 tokens that is four pages
// at once. Memory that is read in streams is fetched ahead by the hardware, and several streams hide the time each
// takes to start (pages of 24 KB in random order, Zen 4: 15 GB/s one by one, 24 GB/s from four at once).
struct Block {
  int64_t rows[kBlock];
  int64_t count = 0;

  void fill(const Call& call, int64_t b, int64_t first, int64_t end) {
    count = std::min(end - first, kBlock);
    int64_t in_order[kBlock];
    find_rows(call.kv, call.pages(b), first, count, in_order);
    for (int64_t i = 0; i < (count + 15) / 16 * 16; i++)
      rows[i] = in_order[count == kBlock ? i / 2 % 4 * (kBlock / 4) + i / 8 * 2 + i % 2 : std::min(i, count - 1)];
  }
};

// A part of one sequence, tokens [first, end), for KV heads [first_head, end_head).
struct Task {
  int64_t b, split, first, end, first_head, end_head;
};

// The smallest piece of work: one block for some query heads of one KV head.
struct Unit {
  const Task* task = nullptr;  // null behind the last
  const Block* block = nullptr;
  int64_t kv_head = 0, head = 0, num_heads = 0;
  bool is_first = false, is_last = false;  // of the task's blocks
  bool is_read_first = false;              // of those that read the same rows
};

// The units of one worker in order: block by block, head by head. Tasks are claimed kLead units early, to look ahead.
class Units {
 public:
  static constexpr int kLead = 2;

  Units(const Call& call, const std::vector<Task>& tasks, std::atomic<size_t>& next_task)
      : call_(call), tasks_(tasks), next_task_(next_task) {
    for (int i = 0; i < kLead; i++) add();
  }
  Unit next() {
    add();
    return ring_[taken_++ % kRing];
  }
  // The one that comes `lead` after what next() returned last.
  const Unit& ahead(int lead) const { return ring_[(taken_ - 1 + lead) % kRing]; }

 private:
  static constexpr int kRing = 8;  // also of blocks: the last unit's is in use as well
  static_assert(kRing >= kLead + 2);

  void add() {
    Unit& unit = ring_[added_++ % kRing];
    unit = Unit{};
    if (!task_ || first_ >= task_->end) claim();
    if (!task_) return;
    const int64_t group = call_.group(), of_group = head_ % group, kv_head = head_ / group;
    unit = {task_, &blocks_[block_ % kRing], kv_head, head_, std::min(kHeads, group - of_group), first_ == task_->first,
            first_ + kBlock >= task_->end, of_group == 0};
    head_ += unit.num_heads;
    if (head_ == task_->end_head * group) first_ += kBlock, new_block();
  }
  void claim() {
    const size_t i = next_task_.fetch_add(1, std::memory_order_relaxed);
    task_ = i < tasks_.size() ? &tasks_[i] : nullptr;
    if (!task_) return;
    first_ = task_->first;
    new_block();
  }
  void new_block() {
    head_ = task_->first_head * call_.group();
    if (first_ < task_->end) blocks_[++block_ % kRing].fill(call_, task_->b, first_, task_->end);
  }

  const Call& call_;
  const std::vector<Task>& tasks_;
  std::atomic<size_t>& next_task_;
  const Task* task_ = nullptr;
  int64_t first_ = 0, head_ = 0;
  Unit ring_[kRing];
  Block blocks_[kRing];
  int64_t added_ = 0, taken_ = 0, block_ = 0;
};

// Rows of K or of V of a unit that comes later, on their way to the L2 cache.
struct Ahead {
  const bf16* values = nullptr;
  const int64_t* rows = nullptr;
  int64_t count = 0;

  Ahead(const Call& call, const bf16* pages, const Unit& unit) {
    if (!unit.is_read_first) return;
    values = pages + call.head_offset(unit.kv_head), rows = unit.block->rows, count = unit.block->count;
  }
  // Inlined at any rate, since GCC drops calls that do nothing but prefetch.
  [[gnu::always_inline]] void fetch(int64_t i, int64_t head_dim) const {
    if (i >= count) return;
    const char* row = reinterpret_cast<const char*>(values + rows[i]);
    for (int64_t line = 0; line < 2 * head_dim; line += 64) _mm_prefetch(row + line, _MM_HINT_T1);
  }
};

}  // namespace baton::decode
