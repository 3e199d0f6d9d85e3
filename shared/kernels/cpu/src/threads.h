// A fixed team of threads, one per core, for fork-join loops that take microseconds.
//
// The caller is worker 0. Workers spin for a moment after each loop, since the next loop follows within microseconds
// while a forward runs. Then they sleep, so an idle node uses no CPU time.
#pragma once
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace baton {

class Team {
 public:
  // One worker for each of `cores`, not pinned for -1. The calling thread is not pinned here, but by its owner.
  explicit Team(std::vector<int> cores) : cores_(std::move(cores)) {
    try {
      for (int i = 1; i < size(); i++) threads_.emplace_back([this, i] { work(i); });
    } catch (...) {
      end();
      throw;
    }
  }
  ~Team() { end(); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return cores_.empty() ? 1 : int(cores_.size()); }

  // Runs f(worker) on every worker, and returns when all have returned. If a worker throws, the first exception is
  // thrown again, but only when all have returned, since they use memory of the caller.
  template <class F>
  void run(F&& f) {
    if (size() == 1) return f(0);
    auto caught = [&](int worker) noexcept {
      try {
        f(worker);
      } catch (...) {
        if (!thrown_.test_and_set(std::memory_order_relaxed)) exception_ = std::current_exception();
      }
    };
    call_ = [](void* context, int worker) { (*static_cast<decltype(caught)*>(context))(worker); };
    context_ = &caught;
    left_.store(size() - 1, std::memory_order_relaxed);
    begun_.fetch_add(1, std::memory_order_release);
    begun_.notify_all();
    caught(0);
    for (int spins = 0; left_.load(std::memory_order_acquire) > 0; spins++) {
      if (spins < kSpins) _mm_pause();
      else sched_yield();
    }
    if (thrown_.test(std::memory_order_relaxed)) [[unlikely]] {
      thrown_.clear(std::memory_order_relaxed);
      std::rethrow_exception(std::exchange(exception_, nullptr));
    }
  }

  // Runs f(i) for i in [0, n). Each worker has a contiguous range of them, since memory is read fastest in order. When it
  // is done it takes from the others' ranges, since cores of a shared machine differ in speed.
  template <class F>
  void each(int64_t n, F&& f) {
    if (size() == 1 || n <= 1) {
      for (int64_t i = 0; i < n; i++) f(i);
      return;
    }
    for (int i = 0; i < size(); i++) {
      ranges_[i].next.store(n * i / size(), std::memory_order_relaxed);
      ranges_[i].end = n * (i + 1) / size();
    }
    run([&](int worker) {
      for (int i = 0; i < size(); i++) {
        Range& range = ranges_[(worker + i) % size()];
        while (range.next.load(std::memory_order_relaxed) < range.end) {
          const int64_t taken = range.next.fetch_add(1, std::memory_order_relaxed);
          if (taken < range.end) f(taken);
        }
      }
    });
  }

 private:
  static constexpr int kSpins = 4000;  // about 50 us

  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  void end() {
    stop_ = true;
    begun_.fetch_add(1);
    begun_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void work(int worker) {
    if (cores_[worker] >= 0) {
      cpu_set_t only;
      CPU_ZERO(&only);
      CPU_SET(cores_[worker], &only);
      pthread_setaffinity_np(pthread_self(), sizeof only, &only);  // where this fails the thread runs unpinned
    }
    pthread_setname_np(pthread_self(), "forward-team");
    for (uint32_t seen = 0;;) {
      for (int spins = 0; begun_.load(std::memory_order_acquire) == seen && spins < kSpins; spins++) _mm_pause();
      begun_.wait(seen, std::memory_order_acquire);
      seen++;
      if (stop_) return;
      call_(context_, worker);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<int> cores_;
  std::vector<Range> ranges_ = std::vector<Range>(size());  // of `each`, one for each worker
  std::vector<std::thread> threads_;
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  std::atomic<uint32_t> begun_{0};
  std::atomic<int> left_{0};
  std::atomic<bool> stop_{false};
  std::atomic_flag thrown_;
  std::exception_ptr exception_;
};

}  // namespace baton
