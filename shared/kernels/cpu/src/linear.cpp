#include "linear.h"

#include <algorithm>

#include "linear_epilogue.h"
#include "linear_panel.h"

namespace baton {
namespace {

template <class Epilogue>
void multiply(Team& team, const Rows& x, int64_t m, const PackedLinear& w, const Epilogue& epilogue) {
  if (m == 0) return;
  const int64_t panels = panels_of(w), block = rows_of_block(m, w);
  team.each((m + block - 1) / block * panels, [&](int64_t task) {
    const int64_t panel = task % panels, begin = task / panels * block;
    const char* const next = panel_begin(w, (panel + 1) % panels);
    rows_times_panel(x, begin, std::min(m, begin + block), w, panel, next,
                     [&](int64_t row, const float* y) { epilogue(row, panel, y); });
  });
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

void linear_gelu_mul(Team& team, const Rows& x, int64_t m, const PackedLinear& w, bf16* out) {
  multiply(team, x, m, w, GeluMul{out, w.bias, w.n / 2});
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

extern "C" void baton_linear_gelu_mul(Team* team, const Rows* x, int64_t m, const PackedLinear* w, bf16* out) {
  baton::linear_gelu_mul(*team, *x, m, *w, out);
}
