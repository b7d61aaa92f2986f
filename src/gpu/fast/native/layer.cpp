// One decoder layer for one token of each of a few rows: norm, attention, norm, gated MLP.
//
// A step through a layer is otherwise some eighty small operations, whose fixed costs are most of its time. Results are
// rounded to the type of the hidden states where the operations they stand for would do so.
#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"
#include "linear.h"

REGROW_API int regrow_attention(const void*, const void*, const void*, void*, const std::int32_t*, const std::int64_t*,
                                const std::int32_t*, float, int);

namespace regrow {

// A root mean square norm: weight float32 [size], null for none.
struct Norm {
  const float* weight;
  float epsilon;
};

// Fields of both are those of the structures in layer.py.
struct Layer {
  Product qkv, out, gate_up, down;
  Norm before, after, query, key;
  std::int32_t heads, kv_heads, dim, rotary;
  float scale;
};

// hidden [rows, size] in and out, cos and sin [rows, rotary]; keys and values: the arenas from the first row's slot on,
// with strides in elements; cells int64 [rows]: where a row's own goes; runs int32 [2, rows]: the cells it sees.
struct Step {
  const void* hidden;
  void* out;
  const void *cos, *sin;
  void *keys, *values;
  std::int64_t key_strides[3], value_strides[3];  // slot, head, cell
  const std::int64_t* cells;
  const std::int32_t* runs;
  std::int32_t rows, context, is_bf16;  // context: cells of an arena
};

namespace {

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
  for (i = 0; i < size; i++) set(y + i, rounded<T>(get(x + i) * by) * norm.weight[i]);
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

// up becomes silu(gate) * up.
template <class T>
void gate(const T* gate, const T* up, T* out, int size) {
  constexpr float LOG2_E = 1.44269504f;
  for (int i = 0; i < size; i += LANES) {
    const int count = std::min(LANES, size - i);
    float x[LANES] = {}, power[LANES];
    for (int j = 0; j < count; j++) x[j] = get(gate + i + j);
    store(power, power_of_2(multiply(load(x), fill(-LOG2_E)), EXACT));
    for (int j = 0; j < count; j++) set(out + i + j, rounded<T>(x[j] / (1 + power[j])) * get(up + i + j));
  }
}

template <class T>
void add(const T* a, const T* b, T* out, std::ptrdiff_t size) {
  for (std::ptrdiff_t i = 0; i < size; i++) set(out + i, get(a + i) + get(b + i));
}

template <class T>
struct Scratch {
  std::vector<T> normed, qkv, seen, sum, mlp, gated;

  T* of(std::vector<T>& buffer, std::size_t size) {
    if (buffer.size() < size) buffer.resize(size);
    return buffer.data();
  }
};

// Returns 1 where attention refuses its runs of cells.
template <class T>
int run(const Layer& layer, const Step& step) {
  static thread_local Scratch<T> scratch;
  const int rows = step.rows, size = layer.qkv.inputs, dim = layer.dim;
  const std::ptrdiff_t all = std::ptrdiff_t(rows) * size;
  const T* hidden = static_cast<const T*>(step.hidden);
  T* normed = scratch.of(scratch.normed, all);
  for (int r = 0; r < rows; r++) norm(layer.before, hidden + r * size, normed + r * size, size);

  const int width = layer.qkv.outputs;
  T* qkv = scratch.of(scratch.qkv, std::size_t(rows) * width);
  multiply(layer.qkv, normed, qkv, rows);
  for (int r = 0; r < rows; r++) {
    const T* cos = static_cast<const T*>(step.cos) + r * layer.rotary;
    const T* sin = static_cast<const T*>(step.sin) + r * layer.rotary;
    T* row = qkv + std::ptrdiff_t(r) * width;
    for (int h = 0; h < layer.heads + layer.kv_heads; h++) {
      const Norm& own = h < layer.heads ? layer.query : layer.key;
      if (own.weight) norm(own, row + h * dim, row + h * dim, dim);
      rotate(row + h * dim, cos, sin, layer.rotary);
    }
    for (int h = 0; h < layer.kv_heads; h++) {
      T* key = static_cast<T*>(step.keys) + r * step.key_strides[0] + h * step.key_strides[1];
      T* value = static_cast<T*>(step.values) + r * step.value_strides[0] + h * step.value_strides[1];
      const T* own = row + (layer.heads + h) * dim;
      std::copy_n(own, dim, key + step.cells[r] * step.key_strides[2]);
      std::copy_n(own + layer.kv_heads * dim, dim, value + step.cells[r] * step.value_strides[2]);
    }
  }

  T* seen = scratch.of(scratch.seen, std::size_t(rows) * layer.heads * dim);
  const std::int64_t strides[9] = {width, dim, width,
                                   step.key_strides[0], step.key_strides[1], step.key_strides[2],
                                   step.value_strides[0], step.value_strides[1], step.value_strides[2]};
  const std::int32_t shape[7] = {rows, 1, layer.heads, layer.kv_heads, dim, dim, step.context};
  if (regrow_attention(qkv, step.keys, step.values, seen, step.runs, strides, shape, layer.scale, step.is_bf16)) {
    return 1;
  }
  multiply(layer.out, seen, normed, rows);
  T* sum = scratch.of(scratch.sum, all);
  add(hidden, normed, sum, all);

  for (int r = 0; r < rows; r++) norm(layer.after, sum + r * size, normed + r * size, size);
  const int inner = layer.down.inputs;
  T* mlp = scratch.of(scratch.mlp, std::size_t(rows) * 2 * inner);
  T* gated = scratch.of(scratch.gated, std::size_t(rows) * inner);
  multiply(layer.gate_up, normed, mlp, rows);
  for (int r = 0; r < rows; r++) {
    const T* row = mlp + std::ptrdiff_t(r) * 2 * inner;
    gate(row, row + inner, gated + std::ptrdiff_t(r) * inner, inner);
  }
  multiply(layer.down, gated, normed, rows);
  add(sum, normed, static_cast<T*>(step.out), all);
  return 0;
}

}  // namespace
}  // namespace regrow

REGROW_API int regrow_layer(const regrow::Layer* layer, const regrow::Step* step) {
  return step->is_bf16 ? regrow::run<regrow::bf16>(*layer, *step) : regrow::run<float>(*layer, *step);
}
