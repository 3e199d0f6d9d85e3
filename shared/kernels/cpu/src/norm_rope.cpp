#include "norm_rope.h"

#include <algorithm>
#include <cmath>

namespace baton {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kTokens = 4;  // tokens of one task, which takes some microseconds

template <class F>
void each_token(Team& team, int64_t T, F&& f) {
  team.each((T + kTokens - 1) / kTokens, [&](int64_t block) {
    for (int64_t t = block * kTokens; t < std::min(T, (block + 1) * kTokens); t++) f(t);
  });
}

template <class In>
float inverse_rms(const In* x, int64_t size, float eps) {
  Floats squares = floats(0.0f);
  for (int64_t i = 0; i < size; i += 16) {
    const Floats part = load_lanes(x + i, lanes_below(size, i));
    squares = fmadd(part, part, squares);
  }
  return 1.0f / std::sqrt(sum_lanes(squares) / float(size) + eps);
}

// Cosine and sine of 16 angles, absolute error below 2e-7. Angles are reduced to [-pi/4, pi/4] in float64, so that
// large positions are as exact as small ones. The polynomials are those of Cephes' sinf and cosf.
void cos_sin16(Floats angle, Floats& cosine, Floats& sine) {
  const auto quarters = [](Doubles x) { return nearest(x * doubles(0.63661977236758134308)); };
  const auto rest = [](Doubles x, Doubles whole) { return fnmadd(whole, doubles(1.57079632679489661923), x); };
  const Doubles lower = lower_doubles(angle), upper = upper_doubles(angle);
  const Doubles lower_quadrant = quarters(lower), upper_quadrant = quarters(upper);
  const Words quadrant = to_ints(lower_quadrant, upper_quadrant);
  const Floats r = to_floats(rest(lower, lower_quadrant), rest(upper, upper_quadrant)), r2 = r * r;
  Floats s = fmadd(floats(-1.9515295891e-4f), r2, floats(8.3321608736e-3f));
  s = fmadd(s, r2, floats(-1.6666654611e-1f));
  s = fmadd(s * r2, r, r);
  Floats c = fmadd(floats(2.443315711809948e-5f), r2, floats(-1.388731625493765e-3f));
  c = fmadd(c, r2, floats(4.166664568298827e-2f));
  c = fmadd(c, r2, floats(-0.5f));
  c = fmadd(c, r2, floats(1.0f));
  const Lanes odd = less(words(0), quadrant & words(1));
  const auto negate_if = [](Floats x, Words condition) {  // bit 1 of `condition` becomes the sign
    return as_floats(as_words(x) ^ shift_left(condition & words(2), 30));
  };
  sine = negate_if(select(odd, c, s), quadrant);
  cosine = negate_if(select(odd, s, c), add(quadrant, words(1)));
}

// Stores x [head_dim] as row `offset` of a head of a page, which begins at `to`.
void write_row(const KVPages& kv, char* to, int64_t offset, const bf16* x) {
  char* const row = to + offset * kv.row_nbytes();
  if (!kv.has_codes) {
    std::memcpy(row, x, size_t(kv.row_nbytes()));
    return;
  }
  float scale;
  int32_t sum;
  const Codes codes{reinterpret_cast<int8_t*>(row), &scale, &sum, kv.head_dim, kv.head_dim, nullptr};
  quantize_row(codes, 0, x);
  std::memcpy(to + kv.rows_nbytes() + offset * int64_t(sizeof scale), &scale, sizeof scale);
}

// Applies the norm (if `weight` is given) and the rotation to one head.
void norm_rope(const bf16* x, int64_t head_dim, const float* weight, float norm, const float* cos_sin, bf16* out) {
  const int64_t half = head_dim / 2;
  const Floats scale = floats(norm);
  for (int64_t i = 0; i < half; i += 16) {
    const Lanes lanes = lanes_below(half, i);
    Floats first = load_lanes(x + i, lanes), second = load_lanes(x + half + i, lanes);
    if (weight) {
      first = first * scale * load_lanes(weight + i, lanes);
      second = second * scale * load_lanes(weight + half + i, lanes);
    }
    const Floats cosine = load_lanes(cos_sin + i, lanes), sine = load_lanes(cos_sin + half + i, lanes);
    store_lanes(out + i, lanes, fmsub(first, cosine, second * sine));
    store_lanes(out + half + i, lanes, fmadd(second, cosine, first * sine));
  }
}

}  // namespace

void embed(Team& team, const int64_t* input_ids, int64_t T, const bf16* table, int64_t size, float scale,
           float* residual) {
  each_token(team, T, [&](int64_t t) {
    for (int64_t i = 0; i < size; i += 16) {
      const Lanes lanes = lanes_below(size, i);
      const Floats row = load_lanes(table + input_ids[t] * size + i, lanes);
      store_lanes(residual + t * size + i, lanes, row * floats(scale));
    }
  });
}

// The norm of one row.
struct NormedRow {
  const float *x, *weight;
  int64_t size;
  float scale;

  NormedRow(const float* x, int64_t size, const float* weight, float eps)
      : x(x), weight(weight), size(size), scale(inverse_rms(x, size, eps)) {}

  Floats operator()(int64_t i) const {  // elements [i, i + 16), 0 where they are past its end
    const Lanes lanes = lanes_below(size, i);
    return scaled(i, lanes) * load_lanes(weight + i, lanes);
  }
  // The same added to `sum` in one rounding, which a compiler may otherwise choose for some calls and not for others.
  Floats added_to(Floats sum, int64_t i) const {
    const Lanes lanes = lanes_below(size, i);
    return fmadd(scaled(i, lanes), load_lanes(weight + i, lanes), sum);
  }
  Floats scaled(int64_t i, Lanes lanes) const {
    return load_lanes(x + i, lanes) * floats(scale);
  }
  float at(int64_t i) const { return x[i] * scale * weight[i]; }
};

void rms_norm(Team& team, const float* x, int64_t T, int64_t size, const float* weight, float eps, bf16* out) {
  each_token(team, T, [&](int64_t t) {
    const NormedRow normed(x + t * size, size, weight, eps);
    for (int64_t i = 0; i < size; i += 16) store_lanes(out + t * size + i, lanes_below(size, i), normed(i));
  });
}

void add_rms_norm(Team& team, const float* x, int64_t T, int64_t size, const float* weight, float eps, float* residual) {
  each_token(team, T, [&](int64_t t) {
    const NormedRow normed(x + t * size, size, weight, eps);
    for (int64_t i = 0; i < size; i += 16) {
      const Lanes lanes = lanes_below(size, i);
      float* const place = residual + t * size + i;
      store_lanes(place, lanes, normed.added_to(load_lanes(place, lanes), i));
    }
  });
}

void rms_norm(Team& team, const float* x, int64_t T, int64_t size, const float* weight, float eps, const Codes& out) {
  each_token(team, T, [&](int64_t t) {
    const NormedRow normed(x + t * size, size, weight, eps);
    quantize_row(out, t, normed, [&](int64_t i) { return normed.at(i); });
  });
}

void rotary_cos_sin(Team& team, const int64_t* positions, int64_t T, const float* waves, int64_t half, float* cos_sin) {
  each_token(team, T, [&](int64_t t) {
    const Floats position = floats(float(positions[t]));
    float* place = cos_sin + t * 2 * half;
    for (int64_t i = 0; i < half; i += 16) {
      const Lanes lanes = lanes_below(half, i);
      Floats cosine, sine;
      cos_sin16(position * load_lanes(waves + i, lanes), cosine, sine);
      const Floats amplitude = load_lanes(waves + half + i, lanes);
      store_lanes(place + i, lanes, cosine * amplitude);
      store_lanes(place + half + i, lanes, sine * amplitude);
    }
  });
}

void norm_rope_write(Team& team, const bf16* qkv, int64_t T, int64_t num_heads, const QkNorm& norm, const float* cos_sin,
                     const KVPages& kv, const int64_t* pages, const int64_t* offsets, bf16* q) {
  const int64_t D = kv.head_dim, K = kv.num_kv_heads, width = (num_heads + 2 * K) * D;
  each_token(team, T, [&](int64_t t) {
    const bf16* x = qkv + t * width;
    const float* token_cos_sin = cos_sin + t * D;
    float of_q = 1.0f, of_k = 1.0f;
    if (norm.is_whole) {
      of_q = inverse_rms(x, num_heads * D, norm.eps);
      of_k = inverse_rms(x + num_heads * D, K * D, norm.eps);
    }
    const auto rotate = [&](int64_t head, bf16* out) {
      const bf16* const from = x + head * D;
      if (norm.weight == nullptr) return norm_rope(from, D, nullptr, 1.0f, token_cos_sin, out);
      const float scale = !norm.is_whole ? inverse_rms(from, D, norm.eps) : head < num_heads ? of_q : of_k;
      norm_rope(from, D, norm.weight + head * D, scale, token_cos_sin, out);
    };
    for (int64_t head = 0; head < num_heads; head++) rotate(head, q + (t * num_heads + head) * D);
    for (int64_t head = 0; head < K; head++) {
      const int64_t place = pages[t] * kv.page_nbytes() + head * kv.head_nbytes();
      bf16 key[kMaxHeadDim];
      rotate(num_heads + head, key);
      write_row(kv, kv.k + place, offsets[t], key);
      write_row(kv, kv.v + place, offsets[t], x + (num_heads + K + head) * D);
    }
  });
}

}  // namespace baton

using baton::bf16, baton::Team;

extern "C" void baton_embed(Team* team, const int64_t* input_ids, int64_t T, const bf16* table, int64_t size,
                            float scale, float* residual) {
  baton::embed(*team, input_ids, T, table, size, scale, residual);
}

extern "C" void baton_rms_norm(Team* team, const float* x, int64_t T, int64_t size, const float* weight, float eps,
                               bf16* out) {
  baton::rms_norm(*team, x, T, size, weight, eps, out);
}

extern "C" void baton_add_rms_norm(Team* team, const float* x, int64_t T, int64_t size, const float* weight, float eps,
                                   float* residual) {
  baton::add_rms_norm(*team, x, T, size, weight, eps, residual);
}

extern "C" void baton_rms_norm_codes(Team* team, const float* x, int64_t T, int64_t size, const float* weight, float eps,
                                     const baton::Codes* out) {
  baton::rms_norm(*team, x, T, size, weight, eps, *out);
}

extern "C" void baton_rotary_cos_sin(Team* team, const int64_t* positions, int64_t T, const float* waves, int64_t half,
                                     float* cos_sin) {
  baton::rotary_cos_sin(*team, positions, T, waves, half, cos_sin);
}

extern "C" void baton_norm_rope_write(Team* team, const bf16* qkv, int64_t T, int64_t num_heads, int64_t num_kv_heads,
                                      int64_t head_dim, const float* norm_weight, float eps, const float* cos_sin,
                                      char* k_pages, char* v_pages, int64_t page_size, int64_t has_codes,
                                      const int64_t* pages, const int64_t* offsets, bf16* q) {
  const baton::KVPages kv{k_pages, v_pages, page_size, num_kv_heads, head_dim, has_codes != 0};
  baton::norm_rope_write(*team, qkv, T, num_heads, {norm_weight, eps}, cos_sin, kv, pages, offsets, q);
}
