// Products of rows with a weight, for the other kernels.
#pragma once

#include <cstdint>

#include "common.h"

namespace regrow {

// A weight [outputs, inputs]: bfloat16 as torch keeps it (bits 16), or codes of 4 or 8 bits in tiles. bias: float32
// [outputs] or null. Its fields are those of `Product` in native.py.
struct Product {
  const void* weight;
  const float* bias;
  std::int32_t bits, inputs, outputs;
};

// y [rows, outputs] = x [rows, inputs] times the weight, plus the bias; both bfloat16 or both float32. A weight in
// bfloat16 takes rows in bfloat16 alone. A packed one rounds a row to 8 bits for each 32 inputs.
void multiply(const Product& product, const bf16* x, bf16* y, int rows);
void multiply(const Product& product, const float* x, float* y, int rows);

// The same for many rows, bfloat16, which are not rounded; where `takes_many` says so.
bool takes_many(const Product& product);
void multiply_many(const Product& product, const bf16* x, bf16* y, int rows);

}  // namespace regrow
