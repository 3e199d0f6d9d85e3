// Gathers KV pages into a staging slot, and scatters a slot into pages.
//
// Pages are scattered in a pool that is larger than the caches, and the CPU's prefetcher starts anew at each page. So
// four pages are copied at once, four cache lines of each in turn. On a Zen 4 core, gathering 16 KiB pages runs at 15
// GB/s instead of 11 (memcpy page by page), and a memcpy of the whole pool runs at 14. Eight pages at once are
// slower, since pages of a power of two use the same sets of the first-level cache. Software prefetch is slower too.
//
// A scatter bypasses the caches: its pages are not read before the whole sequence has arrived, and a plain store
// would first read the line that it overwrites (24 GB/s instead of 16). A gather uses plain stores, since its slot is
// read next.
//
// Any CPU can run this. Without SSE2 all stores are plain ones.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "page_digest.h"

namespace {

using page_digest::kLine;
using page_digest::kVectors;
using page_digest::Line;
using page_digest::Vector;

constexpr int64_t kStepLines = 4;
constexpr int64_t kStep = kStepLines * kLine;  // bytes of a page that are copied before the next page's turn
constexpr int64_t kAtOnce = 4;

typedef void Store(char*, Vector);

struct Page {
  char* to;
  const char* from;
};

// Copies `num` pages, a step of each in turn. `lanes[i]` becomes the sums of page i.
template <bool kDigest, Store* kStore>
inline void copy_at_once(const Page* pages, int64_t num, int64_t nbytes, Line* lanes) {
  page_digest::Keys keys;
  Line sums[kAtOnce] = {};  // not `lanes`, which the stores to a page might overlap for all that the compiler knows
  int64_t at = 0;
  for (; at + kStep <= nbytes; at += kStep) {
    Line of_lines[kStepLines];
    if constexpr (kDigest)
      for (Line& of_line : of_lines) of_line = keys.next();
#pragma GCC unroll 4
    for (int64_t i = 0; i < num; i++) {
      Line lines[kStepLines];
      for (int64_t j = 0; j < kStepLines; j++) lines[j] = page_digest::load_line(pages[i].from + at + j * kLine);
      for (int64_t j = 0; j < kStepLines; j++) {
        for (int64_t v = 0; v < kVectors; v++) {
          const Vector x = lines[j].vectors[v];
          kStore(pages[i].to + at + j * kLine + v * static_cast<int64_t>(sizeof(Vector)), x);
          if constexpr (kDigest) page_digest::add(sums[i].vectors[v], x, of_lines[j].vectors[v]);
        }
      }
    }
  }
  for (; at < nbytes; at += kLine) {
    const int64_t length = std::min(kLine, nbytes - at);
    const Line of_line = keys.next();
    for (int64_t i = 0; i < num; i++) {
      Line line{};
      std::memcpy(&line, pages[i].from + at, length);
      std::memcpy(pages[i].to + at, &line, length);
      for (int64_t v = 0; v < kVectors && kDigest; v++)
        page_digest::add(sums[i].vectors[v], line.vectors[v], of_line.vectors[v]);
    }
  }
  std::copy(sums, sums + num, lanes);
}

// `page(row, id, i)` returns the addresses that the i-th page of a row, `id` in the pool, is copied from and to.
// Returns the digest of the chunk, 0 without one.
template <bool kDigest, Store* kStore, typename At>
uint64_t copy_pages(int64_t num_rows, const int64_t* page_ids, int64_t num_ids, int64_t nbytes, uint64_t seed, At page) {
  const int64_t num_slices = num_rows * num_ids;
  uint64_t digest = 0;
  for (int64_t first = 0; first < num_slices; first += kAtOnce) {
    const int64_t num = std::min(kAtOnce, num_slices - first);
    Page pages[kAtOnce];
    Line lanes[kAtOnce];
    for (int64_t i = 0; i < num; i++) {
      const int64_t row = (first + i) / num_ids, at = (first + i) % num_ids;
      pages[i] = page(row, page_ids[at], at);
    }
    if (num == kAtOnce) {
      copy_at_once<kDigest, kStore>(pages, kAtOnce, nbytes, lanes);  // unrolled
    } else {
      copy_at_once<kDigest, kStore>(pages, num, nbytes, lanes);
    }
    if constexpr (kDigest)
      for (int64_t i = 0; i < num; i++) digest += page_digest::of_slice(lanes[i], seed, first + i);
  }
  return digest;
}

template <Store* kStore, typename At>
void copy(int64_t num_rows, const int64_t* page_ids, int64_t num_ids, int64_t nbytes, uint64_t* digest, At page) {
  if (digest != nullptr) {
    *digest = copy_pages<true, kStore>(num_rows, page_ids, num_ids, nbytes, *digest, page);
  } else {
    copy_pages<false, kStore>(num_rows, page_ids, num_ids, nbytes, 0, page);
  }
}

bool all_within(const int64_t* page_ids, int64_t num_ids, int64_t num_pages) {
  return std::all_of(page_ids, page_ids + num_ids, [&](int64_t id) { return 0 <= id && id < num_pages; });
}

}  // namespace

// `pages` is [num_rows, num_pages] pages of `page_nbytes`, `out` is [num_rows, num_ids]. Returns false where an id is
// out of range. Then nothing was copied. `*digest` is the seed of the digest of `out`, and then the digest. With null no
// digest is taken.
extern "C" bool baton_gather_pages(const char* pages, int64_t num_rows, int64_t num_pages, int64_t page_nbytes,
                                   const int64_t* page_ids, int64_t num_ids, char* out, uint64_t* digest) {
  if (!all_within(page_ids, num_ids, num_pages)) return false;
  copy<page_digest::store>(num_rows, page_ids, num_ids, page_nbytes, digest, [&](int64_t row, int64_t id, int64_t i) {
    return Page{out + (row * num_ids + i) * page_nbytes, pages + (row * num_pages + id) * page_nbytes};
  });
  return true;
}

// The inverse: `src` is [num_rows, num_ids]. The digest is of what was written.
extern "C" bool baton_scatter_pages(char* pages, int64_t num_rows, int64_t num_pages, int64_t page_nbytes,
                                    const int64_t* page_ids, int64_t num_ids, const char* src, uint64_t* digest) {
  if (!all_within(page_ids, num_ids, num_pages)) return false;
  const auto page = [&](int64_t row, int64_t id, int64_t i) {
    return Page{pages + (row * num_pages + id) * page_nbytes, src + (row * num_ids + i) * page_nbytes};
  };
  if (reinterpret_cast<uintptr_t>(pages) % kLine == 0 && page_nbytes % kLine == 0) {
    copy<page_digest::stream>(num_rows, page_ids, num_ids, page_nbytes, digest, page);
  } else {
    copy<page_digest::store>(num_rows, page_ids, num_ids, page_nbytes, digest, page);
  }
#ifdef __SSE2__
  _mm_sfence();  // orders the streamed stores before the message that announces these pages
#endif
  return true;
}
