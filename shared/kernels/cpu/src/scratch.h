// Memory for one array of a forward. It keeps the size of the largest forward so far.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

#include "quantize.h"

namespace baton {

template <class T>
class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* of(int64_t count) {
    if (count > size_) {
      std::free(data_);
      size_ = 0;
      data_ = static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64));
      if (data_ == nullptr) throw std::bad_alloc();
      size_ = count;
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

// The codes of rows.
class CodesScratch {
 public:
  Codes of(int64_t m, int64_t k, int64_t group, const int32_t* order) {
    const int64_t groups = m * (k / group);
    return {values_.of(m * k), scales_.of(groups), sums_.of(groups), k, group, order};
  }

 private:
  Scratch<int8_t> values_;
  Scratch<float> scales_;
  Scratch<int32_t> sums_;
};

}  // namespace baton
