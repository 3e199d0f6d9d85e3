// Rows of x times one panel of a weight of any bits, with the instructions that this CPU has.
#pragma once
#include <algorithm>

#include "linear.h"
#include "linear_amx.h"
#include "linear_int8.h"
#include "linear_int8_amx.h"
#include "linear_vectors.h"
#include "linear_weight_only.h"

namespace baton {

// A block of rows of x stays in a core's L2 while each panel is read once for all of its rows. Tiles compute ten
// times as fast, so a panel must serve more rows, or reading it from the L3 would take longer. CPUs with AMX have 2
// MB of L2.
#ifdef BATON_HAS_AMX
constexpr int64_t kRowsBytes = 1 << 20, kMinRows = 192;
#else
constexpr int64_t kRowsBytes = 256 << 10, kMinRows = 48;
#endif

inline int64_t panels_of(const PackedLinear& w) { return (w.n + kPanel - 1) / kPanel; }

// Bytes of a row of x for w.
inline int64_t row_nbytes(const PackedLinear& w) { return w.takes_codes() ? w.k : 2 * w.k; }

// Rows of a block of m, for which a panel is read once. A small batch is one block.
inline int64_t rows_of_block(int64_t m, const PackedLinear& w) {
  constexpr int64_t kUnpacked = 4;  // weight-only blocks have so many times the rows, since a panel costs more
  const int64_t nbytes = row_nbytes(w) / (w.bits < 16 && w.weight_only ? kUnpacked : 1);
  const int64_t most = std::max(kMinRows, kRowsBytes / nbytes);
  const int64_t blocks = (m + most - 1) / most;
  return (m + blocks - 1) / blocks;
}

// The first byte of a panel.
inline const char* panel_begin(const PackedLinear& w, int64_t panel) {
  return static_cast<const char*>(w.panels) + panel * kPanel * w.k * w.bits / 8;
}

template <class Finish>
void values_times_panel(const bf16* x, int64_t begin, int64_t end, int64_t k, const char* panel, const char* next,
                        Finish&& finish) {
  const bf16* const weights = reinterpret_cast<const bf16*>(panel);
#ifdef BATON_HAS_AMX
  if (amx::usable(k)) return amx::rows_times_panel(x, begin, end, k, weights, finish);
#endif
  vectors::rows_times_panel(x, begin, end, k, weights, reinterpret_cast<const bf16*>(next), finish);
}

template <class Code, class Finish>
void codes_times_panel(const Rows& x, int64_t begin, int64_t end, const PackedLinear& w, int64_t panel, const char* next,
                       Finish&& finish) {
  const int8::Panel<Code> codes = int8::panel_of<Code>(w, panel);
  if (w.weight_only)
    return weight_only::rows_times_panel<Code>(x.values, begin, end, w.k, w.group, codes, finish);
#ifdef BATON_HAS_AMX
  if (int8::use_tiles(end - begin, x.codes.group))
    return int8::rows_times_panel_by_tiles<Code>(x.codes, begin, end, codes, finish);
#endif
  int8::rows_times_panel<Code>(x.codes, begin, end, codes, reinterpret_cast<const uint8_t*>(next), finish);
}

// Calls finish(row, y) for rows [begin, end) of x times a panel of w: y are the 64 sums of the panel's columns. `next` is
// the panel that this thread is likely to read next.
template <class Finish>
void rows_times_panel(const Rows& x, int64_t begin, int64_t end, const PackedLinear& w, int64_t panel, const char* next,
                      Finish&& finish) {
  switch (w.bits) {
    case 4:
      return w.is_float ? codes_times_panel<Fp4>(x, begin, end, w, panel, next, finish)
                        : codes_times_panel<Int4>(x, begin, end, w, panel, next, finish);
    case 8: return codes_times_panel<Int8>(x, begin, end, w, panel, next, finish);
    default: return values_times_panel(x.values, begin, end, w.k, panel_begin(w, panel), next, finish);
  }
}

}  // namespace baton
