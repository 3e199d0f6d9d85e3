// The result of the functions that an engine calls. No exception leaves them, since Python could not catch it.
#pragma once
#include <cstdint>
#include <new>

namespace baton {

enum Status : int64_t { kDone = 0, kUnknownToken = 1, kOutOfMemory = 2 };

template <class Call>
int64_t status_of(Call&& call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return kOutOfMemory;
  }
}

}  // namespace baton
