// Sixteen floats that are computed on at once: one vector with AVX-512, loops that a compiler turns into smaller
// ones elsewhere.
#pragma once

#include <cmath>

#include "common.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace regrow {

constexpr int LANES = 16;

// 2^x for x in [-0.5, 0.5]: the polynomial of the Cephes library, and a shorter one whose error of 4e-5 is far below
// bfloat16's rounding. Both give 1 for 0.
constexpr float EXACT[] = {1.535336188319500e-4f, 1.339887440266574e-3f, 9.618437357674640e-3f,
                           5.550332471162809e-2f, 2.402264791363012e-1f, 6.931472028550421e-1f, 1.0f};
constexpr float SHORT[] = {9.618129107628477e-3f, 5.550410866482158e-2f, 2.402265069591007e-1f,
                           6.931471805599453e-1f, 1.0f};
constexpr float LEAST = -200.0f;  // 2 to this power is 0

#if defined(__AVX512F__)
struct Lanes {
  __m512 v;
};
inline Lanes fill(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Lanes load(const bf16* p) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
// Rounds as `to_bf16` does.
inline void store(bf16* p, Lanes a) {
  const __m512i bits = _mm512_castps_si512(a.v), high = _mm512_srli_epi32(bits, 16);
  const __m512i plus = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(high, _mm512_set1_epi32(1)));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, plus), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(kept));
}
inline Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes subtract(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes multiply(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes divide(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes larger(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is a NaN

// a where first <= position < end, `other` elsewhere.
inline Lanes keep_within(Lanes a, int position, const std::int32_t* first, const std::int32_t* end, float other) {
  const __m512i at = _mm512_set1_epi32(position);
  const __mmask16 begun = _mm512_cmple_epi32_mask(_mm512_loadu_si512(first), at);
  const __mmask16 within = _mm512_mask_cmpgt_epi32_mask(begun, _mm512_loadu_si512(end), at);
  return {_mm512_mask_blend_ps(within, _mm512_set1_ps(other), a.v)};
}

template <std::size_t N>
inline Lanes power_of_2(Lanes x, const float (&coefficients)[N]) {
  x = larger(fill(LEAST), x);
  const __m512 whole = _mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Lanes rest = {_mm512_sub_ps(x.v, whole)};
  Lanes y = fill(coefficients[0]);
  for (std::size_t i = 1; i < N; i++) y = multiply_add(y, rest, fill(coefficients[i]));
  return {_mm512_scalef_ps(y.v, whole)};
}
#else
struct Lanes {
  float v[LANES];
};
template <class F>
inline Lanes each(F f) {
  Lanes out;
  for (int i = 0; i < LANES; i++) out.v[i] = f(i);
  return out;
}
inline Lanes fill(float x) {
  return each([&](int) { return x; });
}
inline Lanes load(const float* p) {
  return each([&](int i) { return p[i]; });
}
inline Lanes load(const bf16* p) {
  return each([&](int i) { return from_bf16(p[i]); });
}
inline void store(float* p, Lanes a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store(bf16* p, Lanes a) {
  for (int i = 0; i < LANES; i++) p[i] = to_bf16(a.v[i]);
}
inline Lanes add(Lanes a, Lanes b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Lanes subtract(Lanes a, Lanes b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Lanes multiply(Lanes a, Lanes b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Lanes divide(Lanes a, Lanes b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline Lanes larger(Lanes a, Lanes b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Lanes keep_within(Lanes a, int position, const std::int32_t* first, const std::int32_t* end, float other) {
  return each([&](int i) { return first[i] <= position && position < end[i] ? a.v[i] : other; });
}
template <std::size_t N>
inline Lanes power_of_2(Lanes x, const float (&coefficients)[N]) {
  return each([&](int i) {
    const float limited = LEAST > x.v[i] ? LEAST : x.v[i], whole = std::nearbyintf(limited), rest = limited - whole;
    float y = coefficients[0];
    for (std::size_t j = 1; j < N; j++) y = y * rest + coefficients[j];
    return std::isnan(whole) ? whole : std::ldexp(y, int(whole));
  });
}
#endif

}  // namespace regrow
