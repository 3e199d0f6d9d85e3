// Rows of codes times one panel of codes with AMX. 16 units of four k by 16 columns of a panel have the layout of a tile.
//
// The integers are those of linear_int8.h, and what is made of them is the same code, so the results have the same bits.
#pragma once
#include "amx.h"
#include "linear_int8.h"

#ifdef BATON_HAS_AMX
namespace baton::int8 {

constexpr int64_t kTileK = 64, kTileRows = 16, kMinTileRows = 16;  // fewer rows are read at the same speed without tiles

// Tiles hold whole fractions of a group.
inline int64_t tile_k(int64_t group) { return group % kTileK == 0 ? kTileK : group % 32 == 0 ? 32 : 0; }

inline bool use_tiles(int64_t rows, int64_t group) {
  return rows >= kMinTileRows && tile_k(group) != 0 && amx::permitted();
}

// sums [rows][64] += the products of `size` k, for up to 16 rows. `panel` has a byte for each code.
inline void add_tiles(const int8_t* x, int64_t stride, const uint8_t* panel, int64_t size, int64_t step, int32_t* sums) {
  amx::load<0>(sums, 4 * kPanel), amx::load<1>(sums + 16, 4 * kPanel);
  amx::load<2>(sums + 32, 4 * kPanel), amx::load<3>(sums + 48, 4 * kPanel);
  for (int64_t k = 0; k < size; k += step, panel += step * kPanel) {
    amx::load<4>(x + k, stride);
    amx::load<6>(panel, 4 * kPanel), amx::dot_bytes<0, 4, 6>();
    amx::load<7>(panel + 64, 4 * kPanel), amx::dot_bytes<1, 4, 7>();
    amx::load<6>(panel + 128, 4 * kPanel), amx::dot_bytes<2, 4, 6>();
    amx::load<7>(panel + 192, 4 * kPanel), amx::dot_bytes<3, 4, 7>();
  }
  amx::store<0>(sums, 4 * kPanel), amx::store<1>(sums + 16, 4 * kPanel);
  amx::store<2>(sums + 32, 4 * kPanel), amx::store<3>(sums + 48, 4 * kPanel);
}

// The codes of a group as bytes: those of 8 bits where they are, those of 4 bits in `bytes`.
template <class Code>
const uint8_t* bytes_of(const uint8_t* panel, int64_t group, uint8_t* bytes) {
  if constexpr (Code::kBits == 8) return panel;
  for (int64_t unit = 0; unit < group / 8; unit++)
    for (int64_t i = 0; i < 4 * kPanel; i += 64) {
      const Words both = load_words(panel + unit * 4 * kPanel + i);
      uint8_t* const to = bytes + unit * 8 * kPanel + i;
      store(to, Code::lower(both));
      store(to + 4 * kPanel, Code::upper(both));
    }
  return bytes;
}

constexpr int64_t kUnpacked = 2048;  // most k of 4-bit codes that are unpacked at once
constexpr int64_t kBlockRows = 64;   // rows for which they are

inline void configure(int64_t rows, int64_t step) {
  amx::Shapes shapes;
  for (int tile : {0, 1, 2, 3}) shapes.set(tile, int(rows));
  shapes.set(4, int(rows), int(step));
  for (int tile : {6, 7}) shapes.set(tile, int(step / 4));
  amx::configure(shapes);
}

// Calls finish(row, y) for rows [begin, end) of x times the panel.
template <class Code, class Finish>
void rows_times_panel_by_tiles(const Codes& x, int64_t begin, int64_t end, const Panel<Code>& panel, Finish&& finish) {
  alignas(64) static thread_local float y[kBlockRows * kPanel];
  alignas(64) static thread_local int32_t sums[kBlockRows * kPanel];
  alignas(64) static thread_local uint8_t bytes[Code::kBits == 4 ? kUnpacked * kPanel : 64];
  const int64_t groups = x.groups(), step = tile_k(x.group), part = Code::kBits == 4 ? kUnpacked : x.group;
  int64_t configured = 0;
  for (int64_t first = begin; first < end; first += kBlockRows) {
    const int64_t last = std::min(end, first + kBlockRows);
    for (int64_t g = 0; g < groups; g++) {
      std::memset(sums, 0, size_t(last - first) * kPanel * sizeof(int32_t));
      for (int64_t k = g * x.group; k < (g + 1) * x.group; k += part) {
        const int64_t size = std::min(part, (g + 1) * x.group - k);
        const uint8_t* const codes = bytes_of<Code>(panel.codes + k * Code::kBits / 8 * kPanel, size, bytes);
        for (int64_t row = first; row < last; row += kTileRows) {
          const int64_t rows = std::min(kTileRows, last - row);
          if (rows != configured) configure(configured = rows, step);
          add_tiles(x.values + row * x.k + k, x.k, codes, size, step, sums + (row - first) * kPanel);
        }
      }
      const Scales<Code, 4> scales(panel.scales + g * kPanel);
      for (int64_t row = first; row < last; row++) {
        Words total[4];
        for (int j = 0; j < 4; j++) {
          const uint8_t* const zeros = panel.zeros ? panel.zeros + g * kPanel + 16 * j : nullptr;
          total[j] = add(load_words(sums + (row - first) * kPanel + 16 * j),
                                      first_sums<Code>(zeros, x.sums[row * groups + g]));
        }
        scale_sums(total, x.scales[row * groups + g], scales, g == 0, y + (row - first) * kPanel);
      }
    }
    for (int64_t row = first; row < last; row++) finish(row, y + (row - first) * kPanel);
  }
  amx::release();
}

}  // namespace baton::int8
#endif
