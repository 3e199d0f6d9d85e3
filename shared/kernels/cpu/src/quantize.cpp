#include "quantize.h"

namespace baton {

void quantize(Team& team, const bf16* x, int64_t m, const Codes& to) {
  team.each(m, [&](int64_t row) {
    const bf16* const from = x + row * to.k;
    const auto values = [&](int64_t i) { return load_lanes(from + i, lanes_below(to.k, i)); };
    quantize_row(to, row, values, [&](int64_t i) { return to_float(from[i]); });
  });
}

}  // namespace baton

extern "C" void baton_quantize(baton::Team* team, const baton::bf16* x, int64_t m, const baton::Codes* to) {
  baton::quantize(*team, x, m, *to);
}
