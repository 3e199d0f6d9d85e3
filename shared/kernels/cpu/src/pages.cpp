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

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

typedef uint64_t Line __attribute__((vector_size(64), aligned(1), may_alias));

constexpr int64_t kLine = sizeof(Line);
constexpr int64_t kStep = 4 * kLine;  // bytes of a page that are copied before the next page's turn
constexpr int64_t kAtOnce = 4;

void copy_step(char* to, const char* from) {
  Line* out = reinterpret_cast<Line*>(to);
  const Line* in = reinterpret_cast<const Line*>(from);
  const Line a = in[0], b = in[1], c = in[2], d = in[3];
  out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

// Copies past the caches. `to` is the beginning of a cache line.
void stream_step(char* to, const char* from) {
#if defined(__AVX512F__)
  __m512i lines[4];
  for (int i = 0; i < 4; i++) lines[i] = _mm512_loadu_si512(from + i * kLine);
  for (int i = 0; i < 4; i++) _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i * kLine), lines[i]);
#elif defined(__SSE2__)
  for (int64_t i = 0; i < kStep; i += sizeof(__m128i))
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
#else
  copy_step(to, from);
#endif
}

struct Page {
  char* to;
  const char* from;
};

template <void (*Step)(char*, const char*)>
void copy_at_once(const Page* pages, int64_t nbytes) {
  int64_t at = 0;
  for (; at + kStep <= nbytes; at += kStep)
    for (int64_t i = 0; i < kAtOnce; i++) Step(pages[i].to + at, pages[i].from + at);
  for (int64_t i = 0; i < kAtOnce; i++) std::memcpy(pages[i].to + at, pages[i].from + at, nbytes - at);
}

// `page(row, id, i)` returns the addresses that the i-th page of a row, `id` in the pool, is copied from and to.
template <void (*Step)(char*, const char*), typename At>
void copy_pages(int64_t num_rows, const int64_t* page_ids, int64_t num_ids, int64_t nbytes, At page) {
  Page pages[kAtOnce];
  int64_t num = 0;
  for (int64_t row = 0; row < num_rows; row++) {
    for (int64_t i = 0; i < num_ids; i++) {
      pages[num++] = page(row, page_ids[i], i);
      if (num == kAtOnce) copy_at_once<Step>(pages, nbytes), num = 0;
    }
  }
  for (int64_t i = 0; i < num; i++) std::memcpy(pages[i].to, pages[i].from, nbytes);
}

bool all_within(const int64_t* page_ids, int64_t num_ids, int64_t num_pages) {
  return std::all_of(page_ids, page_ids + num_ids, [&](int64_t id) { return 0 <= id && id < num_pages; });
}

}  // namespace

// `pages` is [num_rows, num_pages] pages of `page_nbytes`, `out` is [num_rows, num_ids]. Returns false where an id is
// out of range. Then nothing was copied.
extern "C" bool baton_gather_pages(const char* pages, int64_t num_rows, int64_t num_pages, int64_t page_nbytes,
                                   const int64_t* page_ids, int64_t num_ids, char* out) {
  if (!all_within(page_ids, num_ids, num_pages)) return false;
  copy_pages<copy_step>(num_rows, page_ids, num_ids, page_nbytes, [&](int64_t row, int64_t id, int64_t i) {
    return Page{out + (row * num_ids + i) * page_nbytes, pages + (row * num_pages + id) * page_nbytes};
  });
  return true;
}

// The inverse: `src` is [num_rows, num_ids].
extern "C" bool baton_scatter_pages(char* pages, int64_t num_rows, int64_t num_pages, int64_t page_nbytes,
                                    const int64_t* page_ids, int64_t num_ids, const char* src) {
  if (!all_within(page_ids, num_ids, num_pages)) return false;
  const auto page = [&](int64_t row, int64_t id, int64_t i) {
    return Page{pages + (row * num_pages + id) * page_nbytes, src + (row * num_ids + i) * page_nbytes};
  };
  if (reinterpret_cast<uintptr_t>(pages) % kLine == 0 && page_nbytes % kLine == 0) {
    copy_pages<stream_step>(num_rows, page_ids, num_ids, page_nbytes, page);
  } else {
    copy_pages<copy_step>(num_rows, page_ids, num_ids, page_nbytes, page);
  }
#ifdef __SSE2__
  _mm_sfence();  // orders the streamed stores before the message that announces these pages
#endif
  return true;
}
