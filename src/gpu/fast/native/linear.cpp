// Linear layers for a few rows: y[r, n] = sum over k of x[r, k] * w[n, k].
//
// A decode step reads every weight once, so what counts is bytes; tiles.h says how packed ones lie.
// With packed weights a row of x is rounded to 8 bits for each 32 inputs, with a scale of its own.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common.h"
#include "linear.h"
#include "tiles.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace regrow {
namespace {

constexpr int MAX_ROWS = 8;

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls run(Count<rows>()) for 1 to MAX_ROWS rows.
template <class Run>
inline void with_rows(int rows, const Run& run) {
  switch (rows) {
    case 1: return run(Count<1>());
    case 2: return run(Count<2>());
    case 3: return run(Count<3>());
    case 4: return run(Count<4>());
    case 5: return run(Count<5>());
    case 6: return run(Count<6>());
    case 7: return run(Count<7>());
    default: return run(Count<MAX_ROWS>());
  }
}

struct Floats {  // 16 of them
#if defined(__AVX512F__)
  __m512 v = _mm512_setzero_ps();
#else
  float v[OUTPUTS] = {};
#endif
};

#if defined(__AVX512F__)
inline Floats load_halves(const std::uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void add_product(Floats& sum, const Floats& a, float b) {
  sum.v = _mm512_fmadd_ps(a.v, _mm512_set1_ps(b), sum.v);
}
inline void add_product(Floats& sum, const Floats& a, const Floats& b, float c) {
  sum.v = _mm512_fmadd_ps(_mm512_mul_ps(b.v, _mm512_set1_ps(c)), a.v, sum.v);
}
inline void store(const Floats& a, float* out) { _mm512_storeu_ps(out, a.v); }
#else
inline Floats load_halves(const std::uint8_t* p) {
  Floats out;
  for (int o = 0; o < OUTPUTS; o++) {
    _Float16 half;
    std::memcpy(&half, p + 2 * o, 2);
    out.v[o] = float(half);
  }
  return out;
}
inline void add_product(Floats& sum, const Floats& a, float b) {
  for (int o = 0; o < OUTPUTS; o++) sum.v[o] += a.v[o] * b;
}
inline void add_product(Floats& sum, const Floats& a, const Floats& b, float c) {
  for (int o = 0; o < OUTPUTS; o++) sum.v[o] += a.v[o] * (b.v[o] * c);
}
inline void store(const Floats& a, float* out) { std::memcpy(out, a.v, sizeof a.v); }
#endif

// The sums over a block's inputs of code times x, for each output of the tile and each row.
#if defined(__AVX512VNNI__)
template <int BITS, int ROWS>
inline void dots(const std::uint8_t* codes, const std::int8_t* x, Floats* out) {
  __m512i sum[ROWS];
  for (int r = 0; r < ROWS; r++) sum[r] = _mm512_setzero_si512();
  for (int i = 0; i < INPUTS / 4; i++) {
    __m512i code;
    if constexpr (BITS == 8) {
      code = _mm512_loadu_si512(codes + 64 * i);
    } else {
      const __m512i pair = _mm512_loadu_si512(codes + 64 * (i / 2));
      code = _mm512_and_si512(i % 2 ? _mm512_srli_epi16(pair, 4) : pair, _mm512_set1_epi8(15));
    }
    for (int r = 0; r < ROWS; r++) {
      std::int32_t four;
      std::memcpy(&four, x + r * INPUTS + 4 * i, 4);
      sum[r] = _mm512_dpbusd_epi32(sum[r], code, _mm512_set1_epi32(four));
    }
  }
  for (int r = 0; r < ROWS; r++) out[r].v = _mm512_cvtepi32_ps(sum[r]);
}
#else
template <int BITS, int ROWS>
inline void dots(const std::uint8_t* codes, const std::int8_t* x, Floats* out) {
  std::int32_t sum[ROWS][OUTPUTS] = {};
  for (int i = 0; i < INPUTS / 4; i++) {
    for (int j = 0; j < 4; j++) {
      std::int32_t code[OUTPUTS];
      for (int o = 0; o < OUTPUTS; o++) code[o] = code_at<BITS>(codes, o, 4 * i + j);
      for (int r = 0; r < ROWS; r++) {
        const std::int32_t one = x[r * INPUTS + 4 * i + j];
        for (int o = 0; o < OUTPUTS; o++) sum[r][o] += code[o] * one;
      }
    }
  }
  float floats[OUTPUTS];
  for (int r = 0; r < ROWS; r++) {
    for (int o = 0; o < OUTPUTS; o++) floats[o] = float(sum[r][o]);
    std::memcpy(&out[r].v, floats, sizeof floats);
  }
}
#endif

constexpr float NONE[INPUTS] = {};

// Rows of x in 8 bits: for each block of 32 inputs the codes of all rows, their scales, and scale times sum.
struct Rounded {
  std::vector<std::int8_t> codes;
  std::vector<float> scale, sum;
};

inline float value(const bf16* x, std::ptrdiff_t i) { return from_bf16(x[i]); }
inline float value(const float* x, std::ptrdiff_t i) { return x[i]; }
inline void put(bf16* y, std::ptrdiff_t i, float v) { y[i] = to_bf16(v); }
inline void put(float* y, std::ptrdiff_t i, float v) { y[i] = v; }

// Rounds 32 values to the nearest codes; returns the sum of the codes.
#if defined(__AVX512F__)
inline std::int32_t round_block(const float* v, float inverse, std::int8_t* codes) {
  const __m512 by = _mm512_set1_ps(inverse);
  __m512i sum = _mm512_setzero_si512();
  for (int i = 0; i < INPUTS; i += 16) {
    const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(v + i), by));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtsepi32_epi8(code));
    sum = _mm512_add_epi32(sum, code);
  }
  return _mm512_reduce_add_epi32(sum);
}
#else
inline std::int32_t round_block(const float* v, float inverse, std::int8_t* codes) {
  std::int32_t sum = 0;
  for (int i = 0; i < INPUTS; i++) {
    const auto code = std::int32_t(std::nearbyintf(v[i] * inverse));
    codes[i] = std::int8_t(code);
    sum += code;
  }
  return sum;
}
#endif

template <class T>
void round_rows(const T* x, int rows, int inputs, Rounded& out) {
  const int blocks = inputs / INPUTS;
  out.codes.resize(std::size_t(blocks) * rows * INPUTS);
  out.scale.resize(std::size_t(blocks) * rows);
  out.sum.resize(std::size_t(blocks) * rows);
  for (int r = 0; r < rows; r++) {
    for (int b = 0; b < blocks; b++) {
      float v[INPUTS], top = 0;
      for (int i = 0; i < INPUTS; i++) v[i] = value(x, std::ptrdiff_t(r) * inputs + b * INPUTS + i);
      std::uint32_t bits = 0;  // the largest magnitude, as bits: above those of infinity it is a NaN
      for (int i = 0; i < INPUTS; i++) {
        std::uint32_t one;
        std::memcpy(&one, v + i, sizeof one);
        bits = std::max(bits, one & 0x7fffffffu);
      }
      std::memcpy(&top, &bits, sizeof top);
      const std::size_t at = std::size_t(b) * rows + r;
      const bool finite = bits < 0x7f800000u;  // what is not must come out as a NaN, not as a number
      const float inverse = finite && top > 0 ? std::min(127 / top, 3e38f) : 0;
      const std::int32_t sum = round_block(finite ? v : NONE, inverse, out.codes.data() + at * INPUTS);
      out.scale[at] = finite ? top / 127 : NAN;
      out.sum[at] = finite ? out.scale[at] * float(sum) : NAN;
    }
  }
}

// One tile for ROWS rows from `row` on, of `rows` in all.
template <int BITS, int ROWS, class T>
void packed_tile(const Rounded& x, const std::uint8_t* block, const float* bias, T* y, int row, int rows, int blocks,
                 int first, int outputs) {
  Floats sum[ROWS];
  for (int b = 0; b < blocks; b++, block += block_bytes(BITS)) {
    const std::size_t at = std::size_t(b) * rows + row;
    Floats dot[ROWS];
    dots<BITS, ROWS>(block, x.codes.data() + at * INPUTS, dot);
    const Floats scale = load_halves(block + code_bytes(BITS));
    const Floats offset = load_halves(block + code_bytes(BITS) + 2 * OUTPUTS);
    for (int r = 0; r < ROWS; r++) {
      add_product(sum[r], dot[r], scale, x.scale[at + r]);
      add_product(sum[r], offset, x.sum[at + r]);
    }
  }
  const int count = std::min(OUTPUTS, outputs - first);
  for (int r = 0; r < ROWS; r++) {
    float out[OUTPUTS];
    store(sum[r], out);
    for (int o = 0; o < count; o++) {
      put(y, std::ptrdiff_t(row + r) * outputs + first + o, bias ? out[o] + bias[first + o] : out[o]);
    }
  }
}

template <int BITS, class T>
void packed(const T* x, const std::uint8_t* w, const float* bias, T* y, int rows, int inputs, int outputs) {
  static thread_local Rounded rounded;
  round_rows(x, rows, inputs, rounded);
  const Rounded& given = rounded;  // the caller's, not each thread's own
  const int blocks = inputs / INPUTS, tiles = (outputs + OUTPUTS - 1) / OUTPUTS;
#pragma omp parallel for schedule(static)
  for (int t = 0; t < tiles; t++) {
    const std::uint8_t* tile = w + std::size_t(t) * blocks * block_bytes(BITS);
    for (int row = 0; row < rows; row += MAX_ROWS) {
      const auto run = [&](auto count) {
        packed_tile<BITS, decltype(count)::value>(given, tile, bias, y, row, rows, blocks, t * OUTPUTS, outputs);
      };
      with_rows(std::min(MAX_ROWS, rows - row), run);
    }
  }
}

// w as bfloat16 or float32 [outputs, inputs].
template <int BITS, class T>
void unpack(const std::uint8_t* w, T* out, int inputs, int outputs) {
  const int blocks = inputs / INPUTS, tiles = (outputs + OUTPUTS - 1) / OUTPUTS;
#pragma omp parallel for schedule(static)
  for (int t = 0; t < tiles; t++) {
    const std::uint8_t* block = w + std::size_t(t) * blocks * block_bytes(BITS);
    const int first = t * OUTPUTS, count = std::min(OUTPUTS, outputs - first);
    for (int b = 0; b < blocks; b++, block += block_bytes(BITS)) {
      float scale[OUTPUTS], offset[OUTPUTS];
      store(load_halves(block + code_bytes(BITS)), scale);
      store(load_halves(block + code_bytes(BITS) + 2 * OUTPUTS), offset);
      for (int o = 0; o < count; o++) {
        T* row = out + std::ptrdiff_t(first + o) * inputs + b * INPUTS;
        for (int i = 0; i < INPUTS; i++) put(row, i, scale[o] * float(code_at<BITS>(block, o, i)) + offset[o]);
      }
    }
  }
}

// One row of w times ROWS rows of x, bfloat16.
#if defined(__AVX512BF16__)
template <int ROWS>
inline void plain_dots(const bf16* w, const bf16* x, int inputs, float* out) {
  __m512 sum[ROWS];
  for (int r = 0; r < ROWS; r++) sum[r] = _mm512_setzero_ps();
  int k = 0;
  for (; k + 32 <= inputs; k += 32) {
    const __m512bh a = (__m512bh)_mm512_loadu_si512(w + k);
    for (int r = 0; r < ROWS; r++) {
      sum[r] = _mm512_dpbf16_ps(sum[r], a, (__m512bh)_mm512_loadu_si512(x + std::ptrdiff_t(r) * inputs + k));
    }
  }
  if (k < inputs) {
    const __mmask32 rest = (1u << (inputs - k)) - 1;
    const __m512bh a = (__m512bh)_mm512_maskz_loadu_epi16(rest, w + k);
    for (int r = 0; r < ROWS; r++) {
      const __m512i b = _mm512_maskz_loadu_epi16(rest, x + std::ptrdiff_t(r) * inputs + k);
      sum[r] = _mm512_dpbf16_ps(sum[r], a, (__m512bh)b);
    }
  }
  for (int r = 0; r < ROWS; r++) out[r] = _mm512_reduce_add_ps(sum[r]);
}
#else
template <int ROWS>
inline void plain_dots(const bf16* w, const bf16* x, int inputs, float* out) {
  constexpr int LANES = 16;
  float sum[ROWS][LANES] = {};
  int k = 0;
  for (; k + LANES <= inputs; k += LANES) {
    for (int r = 0; r < ROWS; r++) {
      for (int j = 0; j < LANES; j++) {
        sum[r][j] += from_bf16(w[k + j]) * from_bf16(x[std::ptrdiff_t(r) * inputs + k + j]);
      }
    }
  }
  for (int r = 0; r < ROWS; r++) {
    float total = 0;
    for (int j = 0; j < LANES; j++) total += sum[r][j];
    for (int j = k; j < inputs; j++) total += from_bf16(w[j]) * from_bf16(x[std::ptrdiff_t(r) * inputs + j]);
    out[r] = total;
  }
}
#endif

void plain(const bf16* x, const bf16* w, const float* bias, bf16* y, int rows, int inputs, int outputs) {
#pragma omp parallel for schedule(static)
  for (int n = 0; n < outputs; n++) {
    for (int row = 0; row < rows; row += MAX_ROWS) {
      with_rows(std::min(MAX_ROWS, rows - row), [&](auto count) {
        constexpr int ROWS = decltype(count)::value;
        float out[ROWS];
        plain_dots<ROWS>(w + std::ptrdiff_t(n) * inputs, x + std::ptrdiff_t(row) * inputs, inputs, out);
        for (int r = 0; r < ROWS; r++) {
          y[std::ptrdiff_t(row + r) * outputs + n] = to_bf16(bias ? out[r] + bias[n] : out[r]);
        }
      });
    }
  }
}

}  // namespace

void multiply(const Product& product, const bf16* x, bf16* y, int rows) {
  const auto* w = static_cast<const std::uint8_t*>(product.weight);
  switch (product.bits) {
    case 4: return packed<4>(x, w, product.bias, y, rows, product.inputs, product.outputs);
    case 8: return packed<8>(x, w, product.bias, y, rows, product.inputs, product.outputs);
    default: return plain(x, static_cast<const bf16*>(product.weight), product.bias, y, rows, product.inputs,
                          product.outputs);
  }
}

void multiply(const Product& product, const float* x, float* y, int rows) {
  const auto* w = static_cast<const std::uint8_t*>(product.weight);
  product.bits == 4 ? packed<4>(x, w, product.bias, y, rows, product.inputs, product.outputs)
                    : packed<8>(x, w, product.bias, y, rows, product.inputs, product.outputs);
}

}  // namespace regrow

using namespace regrow;

REGROW_API void regrow_linear(const Product* product, const void* x, void* y, int is_bf16, int rows) {
  is_bf16 ? multiply(*product, static_cast<const bf16*>(x), static_cast<bf16*>(y), rows)
          : multiply(*product, static_cast<const float*>(x), static_cast<float*>(y), rows);
}

// Whether the next one takes this weight here.
REGROW_API int regrow_takes_many(const Product* product) { return takes_many(*product); }

// Many rows, bfloat16, which are not rounded.
REGROW_API void regrow_linear_many(const Product* product, const bf16* x, bf16* y, int rows) {
  multiply_many(*product, x, y, rows);
}

// The weights that packed ones stand for, bfloat16 or float32 [outputs, inputs].
REGROW_API void regrow_unpack(const Product* product, void* out, int is_bf16) {
  const auto run = [&](auto* to) {
    const auto* w = static_cast<const std::uint8_t*>(product->weight);
    product->bits == 4 ? unpack<4>(w, to, product->inputs, product->outputs)
                       : unpack<8>(w, to, product->inputs, product->outputs);
  };
  is_bf16 ? run(static_cast<bf16*>(out)) : run(static_cast<float*>(out));
}
