#include "linear.h"

#include <algorithm>

#include "linear_amx.h"
#include "linear_vectors.h"
#include "linear_epilogue.h"
#include "linear_int8.h"
#include "linear_int8_amx.h"
#include "linear_weight_only.h"

namespace baton {
namespace {

// A block of rows of x stays in a core's L2 while each panel is read once for all of its rows. Tiles compute ten
// times as fast, so a panel must serve more rows, or reading it from the L3 would take longer. CPUs with AMX have 2
// MB of L2.
#ifdef BATON_HAS_AMX
constexpr int64_t kRowsBytes = 1 << 20, kMinRows = 192;
#else
constexpr int64_t kRowsBytes = 256 << 10, kMinRows = 48;
#endif

// Rows of a block, for which a panel is read once. A small batch is one block.
int64_t rows_of_block(int64_t m, int64_t row_nbytes) {
  const int64_t most = std::max(kMinRows, kRowsBytes / row_nbytes);
  const int64_t blocks = (m + most - 1) / most;
  return (m + blocks - 1) / blocks;
}

// Calls f(panel, the panel that this thread is likely to take next, first row, row after the last) for each block and panel.
template <class F>
void each_panel(Team& team, int64_t m, int64_t row_nbytes, const PackedLinear& w, F&& f) {
  if (m == 0) return;
  const int64_t panels = (w.n + kPanel - 1) / kPanel, block = rows_of_block(m, row_nbytes);
  team.each((m + block - 1) / block * panels, [&](int64_t task) {
    const int64_t begin = task / panels * block;
    f(task % panels, (task + team.size()) % panels, begin, std::min(m, begin + block));
  });
}

template <class Epilogue>
void multiply_values(Team& team, const bf16* x, int64_t m, const PackedLinear& w, const Epilogue& epilogue) {
  const bf16* const panels = static_cast<const bf16*>(w.panels);
  each_panel(team, m, 2 * w.k, w, [&](int64_t panel, int64_t next, int64_t begin, int64_t end) {
    const bf16* const weights = panels + panel * kPanel * w.k;
    const auto finish = [&](int64_t row, const float* y) { epilogue(row, panel, y); };
#ifdef BATON_HAS_AMX
    if (amx::usable(w.k)) return amx::rows_times_panel(x, begin, end, w.k, weights, finish);
#endif
    vectors::rows_times_panel(x, begin, end, w.k, weights, panels + next * kPanel * w.k, finish);
  });
}

template <int Bits, class Epilogue>
void multiply_codes(Team& team, const Codes& x, int64_t m, const PackedLinear& w, const Epilogue& epilogue) {
  each_panel(team, m, w.k, w, [&](int64_t panel, int64_t next, int64_t begin, int64_t end) {
    const auto finish = [&](int64_t row, const float* y) { epilogue(row, panel, y); };
#ifdef BATON_HAS_AMX
    if (int8::use_tiles(end - begin, x.group))
      return int8::rows_times_panel_by_tiles<Bits>(x, begin, end, int8::panel_of(w, panel), finish);
#endif
    int8::rows_times_panel<Bits>(x, begin, end, int8::panel_of(w, panel), int8::panel_of(w, next).codes, finish);
  });
}

template <int Bits, class Epilogue>
void multiply_weight_only(Team& team, const bf16* x, int64_t m, const PackedLinear& w, const Epilogue& epilogue) {
  constexpr int64_t kUnpacked = 4;  // a block has so many times the rows of others, since a panel costs more
  each_panel(team, m, 2 * w.k / kUnpacked, w, [&](int64_t panel, int64_t, int64_t begin, int64_t end) {
    const auto finish = [&](int64_t row, const float* y) { epilogue(row, panel, y); };
    weight_only::rows_times_panel<Bits>(x, begin, end, w.k, w.group, int8::panel_of(w, panel), finish);
  });
}

template <class Epilogue>
void multiply(Team& team, const Rows& x, int64_t m, const PackedLinear& w, const Epilogue& epilogue) {
  switch (w.bits) {
    case 4: return w.weight_only ? multiply_weight_only<4>(team, x.values, m, w, epilogue)
                                 : multiply_codes<4>(team, x.codes, m, w, epilogue);
    case 8: return w.weight_only ? multiply_weight_only<8>(team, x.values, m, w, epilogue)
                                 : multiply_codes<8>(team, x.codes, m, w, epilogue);
    default: return multiply_values(team, x.values, m, w, epilogue);
  }
}

}  // namespace

void linear(Team& team, const Rows& x, int64_t m, const PackedLinear& w, bf16* out) {
  multiply(team, x, m, w, Store<bf16>{out, w.bias, w.n});
}

void linear_float(Team& team, const Rows& x, int64_t m, const PackedLinear& w, float* out) {
  multiply(team, x, m, w, Store<float>{out, w.bias, w.n});
}

void linear_add(Team& team, const Rows& x, int64_t m, const PackedLinear& w, float* residual) {
  multiply(team, x, m, w, Add{residual, w.bias, w.n});
}

void linear_silu_mul(Team& team, const Rows& x, int64_t m, const PackedLinear& w, bf16* out) {
  multiply(team, x, m, w, SiluMul{out, w.bias, w.n / 2});
}

}  // namespace baton

using baton::bf16, baton::PackedLinear, baton::Rows, baton::Team;

extern "C" void baton_linear(Team* team, const Rows* x, int64_t m, const PackedLinear* w, bf16* out) {
  baton::linear(*team, *x, m, *w, out);
}

extern "C" void baton_linear_float(Team* team, const Rows* x, int64_t m, const PackedLinear* w, float* out) {
  baton::linear_float(*team, *x, m, *w, out);
}

extern "C" void baton_linear_add(Team* team, const Rows* x, int64_t m, const PackedLinear* w, float* residual) {
  baton::linear_add(*team, *x, m, *w, residual);
}

extern "C" void baton_linear_silu_mul(Team* team, const Rows* x, int64_t m, const PackedLinear* w, bf16* out) {
  baton::linear_silu_mul(*team, *x, m, *w, out);
}
