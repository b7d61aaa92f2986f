// The small operations between products: norms, rotation, gates. Results are rounded where a model's own code does.
#pragma once

#include <algorithm>
#include <cmath>

#include "common.h"
#include "lanes.h"

namespace regrow {

// A root mean square norm: weight float32 [size], null for none. rounds: what is normed is rounded to its type before
// the weight is multiplied, not after. Its fields are those of `Norm` in native.py.
struct Norm {
  const float* weight;
  float epsilon;
  std::int32_t rounds;
};

inline float get(const bf16* p) { return from_bf16(*p); }
inline float get(const float* p) { return *p; }
inline void set(bf16* p, float v) { *p = to_bf16(v); }
inline void set(float* p, float v) { *p = v; }
template <class T>
inline float rounded(float v) {
  T kept;
  set(&kept, v);
  return get(&kept);
}

template <class T>
void norm(const Norm& norm, const T* x, T* y, int size) {
  constexpr int PARTS = 16;
  float parts[PARTS] = {}, total = 0;
  int i = 0;
  for (; i + PARTS <= size; i += PARTS) {
    for (int j = 0; j < PARTS; j++) parts[j] += get(x + i + j) * get(x + i + j);
  }
  for (; i < size; i++) total += get(x + i) * get(x + i);
  for (float part : parts) total += part;
  const float by = 1 / std::sqrt(total / float(size) + norm.epsilon);
  for (i = 0; i < size; i++) {
    const float one = get(x + i) * by;
    set(y + i, (norm.rounds ? rounded<T>(one) : one) * norm.weight[i]);
  }
}

// Rotates the first `size` of x, pairs half of it apart.
template <class T>
void rotate(T* x, const T* cos, const T* sin, int size) {
  const int half = size / 2;
  for (int i = 0; i < half; i++) {
    const float a = get(x + i), b = get(x + half + i);
    const float turned = rounded<T>(-b * get(sin + i)), other = rounded<T>(a * get(sin + half + i));
    set(x + i, rounded<T>(a * get(cos + i)) + turned);
    set(x + half + i, rounded<T>(b * get(cos + half + i)) + other);
  }
}

// out = silu(gate) * up, for a vector of them.
template <class T>
inline void gate_lanes(const T* gate, const T* up, T* out) {
  constexpr float LOG2_E = 1.44269504f;
  const Lanes x = load(gate), power = power_of_2(multiply(x, fill(-LOG2_E)), EXACT);
  T one[LANES];
  store(one, divide(x, add(fill(1), power)));
  store(out, multiply(load(one), load(up)));
}

template <class T>
void gate(const T* gate, const T* up, T* out, int size) {
  int i = 0;
  for (; i + LANES <= size; i += LANES) gate_lanes(gate + i, up + i, out + i);
  if (i == size) return;
  T last[3][LANES] = {};
  std::copy(gate + i, gate + size, last[0]);
  std::copy(up + i, up + size, last[1]);
  gate_lanes(last[0], last[1], last[2]);
  std::copy_n(last[2], size - i, out + i);
}

}  // namespace regrow
