// What the native kernels share: how they are exported, and the width of a vector.
//
// Every kernel computes a result with the same operations in the same order whatever the number of threads and
// whatever other rows a call has, so that a row's bits depend on nothing but itself. Threads are those of
// OpenMP's symbols in the process, which are torch's: one pool for both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define REGROW_API extern "C" __attribute__((visibility("default")))

namespace regrow {

using bf16 = std::uint16_t;

inline float from_bf16(bf16 value) {
  std::uint32_t bits = std::uint32_t(value) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// Rounds to nearest, ties to even; a NaN stays one.
inline bf16 to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16((bits >> 16) | 0x40u);
  return bf16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace regrow
