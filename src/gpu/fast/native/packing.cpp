// Rounding weights to codes of 4 or 8 bits, and laying codes out in tiles (linear.cpp says how those look).
#include <algorithm>
#include <cmath>

#include "common.h"
#include "tiles.h"

namespace regrow {
namespace {

// Spans to try for 4 bits: less span costs the extremes and serves the others.
constexpr float SHRINK[] = {1.0f, 0.96f, 0.92f, 0.88f, 0.84f};

inline void store_half(std::uint16_t* out, _Float16 value) { std::memcpy(out, &value, 2); }

// The codes nearest to w with w = scale * code + offset; returns the squared error.
inline float encode(const float* w, float scale, float offset, float top, std::uint8_t* codes) {
  const float by = scale == 0 ? 1 : scale;
  float error = 0;
  for (int i = 0; i < INPUTS; i++) {
    const float code = std::min(std::max(std::nearbyint((w[i] - offset) / by), 0.0f), top);
    const float off = code * scale + offset - w[i];
    codes[i] = std::uint8_t(code);
    error += off * off;
  }
  return error;
}

void quantize_block(const float* w, int bits, std::uint8_t* codes, std::uint16_t* scale, std::uint16_t* offset) {
  float low = w[0], high = w[0];
  for (int i = 1; i < INPUTS; i++) {
    low = std::min(low, w[i]);
    high = std::max(high, w[i]);
  }
  if (bits == 8) {
    const auto by = _Float16(std::max(-low, high) / 127);
    const auto plus = _Float16(-128 * float(by));
    encode(w, by, plus, 255, codes);
    store_half(scale, by);
    store_half(offset, plus);
    return;
  }
  const float middle = (low + high) / 2, half = (high - low) / 2;
  float least = INFINITY;
  for (const float shrink : SHRINK) {
    const float reach = half * shrink;
    const auto by = _Float16(reach / 7.5f), plus = _Float16(middle - reach);
    std::uint8_t tried[INPUTS];
    const float error = encode(w, by, plus, 15, tried);
    if (error < least) {
      least = error;
      std::memcpy(codes, tried, INPUTS);
      store_half(scale, by);
      store_half(offset, plus);
    }
  }
}

}  // namespace
}  // namespace regrow

using namespace regrow;

// w, bfloat16 or float32 [outputs, inputs], to codes [outputs, inputs], scale and offset [outputs, inputs / 32].
REGROW_API void regrow_quantize(const void* w, int is_bf16, int bits, int outputs, int inputs, std::uint8_t* codes,
                                std::uint16_t* scale, std::uint16_t* offset) {
  const std::ptrdiff_t blocks = std::ptrdiff_t(outputs) * inputs / INPUTS;
#pragma omp parallel for schedule(static)
  for (std::ptrdiff_t b = 0; b < blocks; b++) {
    float values[INPUTS];
    for (int i = 0; i < INPUTS; i++) {
      const std::ptrdiff_t at = b * INPUTS + i;
      values[i] = is_bf16 ? from_bf16(static_cast<const bf16*>(w)[at]) : static_cast<const float*>(w)[at];
    }
    quantize_block(values, bits, codes + b * INPUTS, scale + b, offset + b);
  }
}

// Codes as above to tiles, [outputs / 16 rounded up, inputs / 32, bytes of a block].
REGROW_API void regrow_tile(const std::uint8_t* codes, const std::uint16_t* scale, const std::uint16_t* offset,
                            int bits, int outputs, int inputs, std::uint8_t* tiles) {
  const int blocks = inputs / INPUTS, count = (outputs + OUTPUTS - 1) / OUTPUTS;
#pragma omp parallel for schedule(static)
  for (int t = 0; t < count; t++) {
    for (int b = 0; b < blocks; b++) {
      std::uint8_t* block = tiles + (std::size_t(t) * blocks + b) * block_bytes(bits);
      std::memset(block, 0, block_bytes(bits));
      for (int o = 0; o < std::min(OUTPUTS, outputs - t * OUTPUTS); o++) {
        const std::size_t row = std::size_t(t) * OUTPUTS + o;
        const std::uint8_t* from = codes + row * inputs + b * INPUTS;
        for (int i = 0; i < INPUTS; i++) {
          bits == 8 ? set_code<8>(block, o, i, from[i]) : set_code<4>(block, o, i, from[i]);
        }
        std::memcpy(block + code_bytes(bits) + 2 * o, scale + row * blocks + b, 2);
        std::memcpy(block + code_bytes(bits) + 2 * (OUTPUTS + o), offset + row * blocks + b, 2);
      }
    }
  }
}
