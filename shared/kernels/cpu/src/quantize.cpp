#include "quantize.h"

namespace baton {

void quantize(Team& team, const bf16* x, int64_t m, const Codes& to) {
  team.each(m, [&](int64_t row) { quantize_row(to, row, x + row * to.k); });
}

}  // namespace baton

extern "C" void baton_quantize(baton::Team* team, const baton::bf16* x, int64_t m, const baton::Codes* to) {
  baton::quantize(*team, x, m, *to);
}
