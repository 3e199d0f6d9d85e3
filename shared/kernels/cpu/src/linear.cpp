#include "linear.h"

#include <algorithm>

#include "linear_amx.h"
#include "linear_avx512.h"
#include "linear_epilogue.h"

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
int64_t rows_of_block(int64_t m, int64_t k) {
  const int64_t most = std::max(kMinRows, kRowsBytes / (2 * k));
  const int64_t blocks = (m + most - 1) / most;
  return (m + blocks - 1) / blocks;
}

template <class Epilogue>
void multiply(Team& team, const bf16* x, int64_t m, const PackedLinear& w, const Epilogue& epilogue) {
  if (m == 0) return;
  const int64_t panels = (w.n + kPanel - 1) / kPanel, block = rows_of_block(m, w.k);
  team.each((m + block - 1) / block * panels, [&](int64_t task) {
    const int64_t panel = task % panels, begin = task / panels * block, end = std::min(m, begin + block);
    const bf16* const weights = w.panels + panel * kPanel * w.k;
    const auto finish = [&](int64_t row, const float* y) { epilogue(row, panel, y); };
#ifdef BATON_HAS_AMX
    if (amx::usable(w.k)) return amx::rows_times_panel(x, begin, end, w.k, weights, finish);
#endif
    const bf16* const next = w.panels + (task + team.size()) % panels * kPanel * w.k;  // a guess
    avx512::rows_times_panel(x, begin, end, w.k, weights, next, finish);
  });
}

}  // namespace

void linear(Team& team, const bf16* x, int64_t m, const PackedLinear& w, bf16* out) {
  multiply(team, x, m, w, Store<bf16>{out, w.bias, w.n});
}

void linear_float(Team& team, const bf16* x, int64_t m, const PackedLinear& w, float* out) {
  multiply(team, x, m, w, Store<float>{out, w.bias, w.n});
}

void linear_add(Team& team, const bf16* x, int64_t m, const PackedLinear& w, float* residual) {
  multiply(team, x, m, w, Add{residual, w.bias, w.n});
}

void linear_silu_mul(Team& team, const bf16* x, int64_t m, const PackedLinear& w, bf16* out) {
  multiply(team, x, m, w, SiluMul{out, w.bias, w.n / 2});
}

}  // namespace baton

using baton::bf16, baton::PackedLinear, baton::Team;

extern "C" void baton_linear(Team* team, const bf16* x, int64_t m, const bf16* panels, const float* bias, int64_t n,
                             int64_t k, bf16* out) {
  baton::linear(*team, x, m, {panels, bias, n, k}, out);
}

extern "C" void baton_linear_float(Team* team, const bf16* x, int64_t m, const bf16* panels, const float* bias, int64_t n,
                                   int64_t k, float* out) {
  baton::linear_float(*team, x, m, {panels, bias, n, k}, out);
}

extern "C" void baton_linear_add(Team* team, const bf16* x, int64_t m, const bf16* panels, const float* bias, int64_t n,
                                 int64_t k, float* residual) {
  baton::linear_add(*team, x, m, {panels, bias, n, k}, residual);
}

extern "C" void baton_linear_silu_mul(Team* team, const bf16* x, int64_t m, const bf16* panels, const float* bias,
                                      int64_t n, int64_t k, bf16* out) {
  baton::linear_silu_mul(*team, x, m, {panels, bias, n, k}, out);
}
