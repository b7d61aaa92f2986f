// How packed weights lie in memory.
//
// A tile is 16 outputs; it holds, for each 32 inputs, a block: the codes of its 16 outputs, then 16 scales and 16
// offsets in float16. A weight is scale * code + offset. That is what Q4_0, Q4_1 and Q8_0 blocks of GGUF hold, without
// loss (Q4_0 with an offset of -8 scales, Q8_0 with one of -128).
//
// Codes of 4 bits: byte 64 i + 4 o + j of a block has the code of output o and input 8 i + j in its low half, of input
// 8 i + 4 + j in its high half. Codes of 8 bits: byte 64 i + 4 o + j is that of output o and input 4 i + j.
#pragma once

#include <cstdint>

namespace regrow {

constexpr int OUTPUTS = 16;  // of a tile
constexpr int INPUTS = 32;   // of a block

constexpr int code_bytes(int bits) { return OUTPUTS * INPUTS * bits / 8; }
constexpr int block_bytes(int bits) { return code_bytes(bits) + 2 * OUTPUTS * 2; }

template <int BITS>
inline std::int32_t code_at(const std::uint8_t* block, int o, int i) {
  if constexpr (BITS == 8) return block[64 * (i / 4) + 4 * o + i % 4];
  return (block[64 * (i / 8) + 4 * o + i % 4] >> (i / 4 % 2 * 4)) & 15;
}

// Sets a code of a block that is zero.
template <int BITS>
inline void set_code(std::uint8_t* block, int o, int i, std::uint8_t code) {
  if constexpr (BITS == 8) {
    block[64 * (i / 4) + 4 * o + i % 4] = code;
  } else {
    block[64 * (i / 8) + 4 * o + i % 4] |= std::uint8_t(code << (i / 4 % 2 * 4));
  }
}

}  // namespace regrow
