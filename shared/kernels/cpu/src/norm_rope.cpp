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
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 16) {
    const __m512 part = load_lanes(x + i, lanes_below(size, i));
    squares = _mm512_fmadd_ps(part, part, squares);
  }
  return 1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / float(size) + eps);
}

// Cosine and sine of 16 angles, absolute error below 2e-7. Angles are reduced to [-pi/4, pi/4] in float64, so that
// large positions are as exact as small ones. The polynomials are those of Cephes' sinf and cosf.
void cos_sin16(__m512 angle, __m512& cosine, __m512& sine) {
  const auto reduce = [](__m256 angle, __m256i& quadrant) {
    const __m512d wide = _mm512_cvtps_pd(angle);
    const __m512d turns = _mm512_mul_pd(wide, _mm512_set1_pd(0.63661977236758134308));
    const __m512d whole = _mm512_roundscale_pd(turns, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    quadrant = _mm512_cvtpd_epi32(whole);
    return _mm512_cvtpd_ps(_mm512_fnmadd_pd(whole, _mm512_set1_pd(1.57079632679489661923), wide));
  };
  __m256i lower_quadrant, upper_quadrant;
  const __m256 lower = reduce(_mm512_castps512_ps256(angle), lower_quadrant);
  const __m256 upper = reduce(_mm512_extractf32x8_ps(angle, 1), upper_quadrant);
  const __m512 r = _mm512_insertf32x8(_mm512_castps256_ps512(lower), upper, 1);
  const __m512i quadrant = _mm512_inserti64x4(_mm512_castsi256_si512(lower_quadrant), upper_quadrant, 1);
  const __m512 r2 = _mm512_mul_ps(r, r);
  __m512 s = _mm512_fmadd_ps(_mm512_set1_ps(-1.9515295891e-4f), r2, _mm512_set1_ps(8.3321608736e-3f));
  s = _mm512_fmadd_ps(s, r2, _mm512_set1_ps(-1.6666654611e-1f));
  s = _mm512_fmadd_ps(_mm512_mul_ps(s, r2), r, r);
  __m512 c = _mm512_fmadd_ps(_mm512_set1_ps(2.443315711809948e-5f), r2, _mm512_set1_ps(-1.388731625493765e-3f));
  c = _mm512_fmadd_ps(c, r2, _mm512_set1_ps(4.166664568298827e-2f));
  c = _mm512_fmadd_ps(c, r2, _mm512_set1_ps(-0.5f));
  c = _mm512_fmadd_ps(c, r2, _mm512_set1_ps(1.0f));
  const __mmask16 odd = _mm512_test_epi32_mask(quadrant, _mm512_set1_epi32(1));
  const auto negate_if = [](__m512 x, __m512i condition) {  // bit 1 of `condition` becomes the sign
    return _mm512_xor_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_and_si512(condition, _mm512_set1_epi32(2)), 30)));
  };
  sine = negate_if(_mm512_mask_blend_ps(odd, s, c), quadrant);
  cosine = negate_if(_mm512_mask_blend_ps(odd, c, s), _mm512_add_epi32(quadrant, _mm512_set1_epi32(1)));
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
  quantize_row(codes, 0, [&](int64_t i) { return load_lanes(x + i, lanes_below(kv.head_dim, i)); },
               [&](int64_t i) { return to_float(x[i]); });
  std::memcpy(to + kv.rows_nbytes() + offset * int64_t(sizeof scale), &scale, sizeof scale);
}

// Applies the norm (if `weight` is given) and the rotation to one head.
void norm_rope(const bf16* x, int64_t head_dim, const float* weight, float eps, const float* cos_sin, bf16* out) {
  const int64_t half = head_dim / 2;
  const __m512 scale = _mm512_set1_ps(weight ? inverse_rms(x, head_dim, eps) : 1.0f);
  for (int64_t i = 0; i < half; i += 16) {
    const __mmask16 lanes = lanes_below(half, i);
    __m512 first = load_lanes(x + i, lanes), second = load_lanes(x + half + i, lanes);
    if (weight) {
      first = _mm512_mul_ps(_mm512_mul_ps(first, scale), load_lanes(weight + i, lanes));
      second = _mm512_mul_ps(_mm512_mul_ps(second, scale), load_lanes(weight + half + i, lanes));
    }
    const __m512 cosine = load_lanes(cos_sin + i, lanes), sine = load_lanes(cos_sin + half + i, lanes);
    store_lanes(out + i, lanes, _mm512_fmsub_ps(first, cosine, _mm512_mul_ps(second, sine)));
    store_lanes(out + half + i, lanes, _mm512_fmadd_ps(second, cosine, _mm512_mul_ps(first, sine)));
  }
}

}  // namespace

void embed(Team& team, const int64_t* input_ids, int64_t T, const bf16* table, int64_t size, float* residual) {
  each_token(team, T, [&](int64_t t) {
    for (int64_t i = 0; i < size; i += 16) {
      const __mmask16 lanes = lanes_below(size, i);
      store_lanes(residual + t * size + i, lanes, load_lanes(table + input_ids[t] * size + i, lanes));
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

  __m512 operator()(int64_t i) const {  // elements [i, i + 16), 0 where they are past its end
    const __mmask16 lanes = lanes_below(size, i);
    return _mm512_mul_ps(scaled(i, lanes), load_lanes(weight + i, lanes));
  }
  // The same added to `sum` in one rounding, which a compiler may otherwise choose for some calls and not for others.
  __m512 added_to(__m512 sum, int64_t i) const {
    const __mmask16 lanes = lanes_below(size, i);
    return _mm512_fmadd_ps(scaled(i, lanes), load_lanes(weight + i, lanes), sum);
  }
  __m512 scaled(int64_t i, __mmask16 lanes) const {
    return _mm512_mul_ps(load_lanes(x + i, lanes), _mm512_set1_ps(scale));
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
      const __mmask16 lanes = lanes_below(size, i);
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
    const __m512 position = _mm512_set1_ps(float(positions[t]));
    float* place = cos_sin + t * 2 * half;
    for (int64_t i = 0; i < half; i += 16) {
      const __mmask16 lanes = lanes_below(half, i);
      __m512 cosine, sine;
      cos_sin16(_mm512_mul_ps(position, load_lanes(waves + i, lanes)), cosine, sine);
      const __m512 amplitude = load_lanes(waves + half + i, lanes);
      store_lanes(place + i, lanes, _mm512_mul_ps(cosine, amplitude));
      store_lanes(place + half + i, lanes, _mm512_mul_ps(sine, amplitude));
    }
  });
}

void norm_rope_write(Team& team, const bf16* qkv, int64_t T, int64_t num_heads, const QkNorm& norm, const float* cos_sin,
                     const KVPages& kv, const int64_t* pages, const int64_t* offsets, bf16* q) {
  const int64_t D = kv.head_dim, K = kv.num_kv_heads, width = (num_heads + 2 * K) * D;
  each_token(team, T, [&](int64_t t) {
    const bf16* x = qkv + t * width;
    const float* token_cos_sin = cos_sin + t * D;
    const auto rotate = [&](int64_t head, bf16* out) {
      const float* weight = norm.weight ? norm.weight + head * D : nullptr;
      norm_rope(x + head * D, D, weight, norm.eps, token_cos_sin, out);
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
                            float* residual) {
  baton::embed(*team, input_ids, T, table, size, residual);
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
