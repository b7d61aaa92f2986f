// One decoder layer for a chunk, or for one token of each of a few slots: norm, attention, norm, gated MLP; and its norms
// and its MLP alone, for layers of other shapes.
//
// A layer is otherwise some eighty small operations, whose fixed costs are most of a step's time. Results are rounded to
// the type of the hidden states where the operations they stand for would do so.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "linear.h"
#include "norm.h"

REGROW_API int regrow_attention(const void*, const void*, const void*, void*, const std::int32_t*, const std::int64_t*,
                                const std::int32_t*, float, int);

namespace regrow {

// Fields of both are those of the structures in layer.py.
struct Layer {
  Product qkv, out, gate_up, down;
  Norm before, after, query, key;
  std::int32_t heads, kv_heads, dim, rotary;
  float scale;
};

// hidden [slots, tokens, size] in and out, cos and sin [slots, tokens, rotary]; keys and values: the arenas from the first
// slot on, with strides in elements; cells int64 [slots, tokens]: where a token's own goes; runs int32 [2, slots, tokens]:
// the cells it sees.
struct Step {
  const void* hidden;
  void* out;
  const void *cos, *sin;
  void *keys, *values;
  std::int64_t key_strides[3], value_strides[3];  // slot, head, cell
  const std::int64_t* cells;
  const std::int32_t* runs;
  std::int32_t slots, tokens, context, is_bf16;  // context: cells of an arena
};

namespace {

constexpr int FEW = 32;  // rows that are rounded to 8 bits for a packed weight; that of linear.py

template <class T>
void product(const Product& product, const T* x, T* y, int rows) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (rows > FEW) return multiply_many(product, x, y, rows);
  }
  multiply(product, x, y, rows);
}

// Calls run(row) for all of them; one thread does what is little.
template <class Run>
void each(int rows, const Run& run) {
#pragma omp parallel for schedule(static) if (rows > FEW)
  for (int r = 0; r < rows; r++) run(r);
}

template <class T>
void add(const T* a, const T* b, T* out, int size) {
  for (int i = 0; i < size; i++) set(out + i, get(a + i) + get(b + i));
}

template <class T>
struct Scratch {
  std::vector<T> normed, qkv, seen, sum, mlp, gated;

  T* of(std::vector<T>& buffer, std::size_t size) {
    if (buffer.size() < size) buffer.resize(size);
    return buffer.data();
  }
};

// y [rows, outputs] = down(silu(gate(x)) * up(x)); y may be x.
template <class T>
void mlp(const Product& gate_up, const Product& down, const T* x, T* y, int rows, Scratch<T>& scratch) {
  const int inner = down.inputs;
  T* both = scratch.of(scratch.mlp, std::size_t(rows) * 2 * inner);
  T* gated = scratch.of(scratch.gated, std::size_t(rows) * inner);
  product(gate_up, x, both, rows);
  each(rows, [&](int r) {
    const T* row = both + std::ptrdiff_t(r) * 2 * inner;
    gate(row, row + inner, gated + std::ptrdiff_t(r) * inner, inner);
  });
  product(down, gated, y, rows);
}

// Returns 1 where attention refuses its runs of cells.
template <class T>
int run(const Layer& layer, const Step& step) {
  static thread_local Scratch<T> scratch;
  const int rows = step.slots * step.tokens, size = layer.qkv.inputs, dim = layer.dim;
  const std::ptrdiff_t all = std::ptrdiff_t(rows) * size;
  const T* hidden = static_cast<const T*>(step.hidden);
  T* normed = scratch.of(scratch.normed, all);
  each(rows, [&](int r) {
    const std::ptrdiff_t at = std::ptrdiff_t(r) * size;
    norm(layer.before, hidden + at, normed + at, size);
  });

  const int width = layer.qkv.outputs;
  T* qkv = scratch.of(scratch.qkv, std::size_t(rows) * width);
  product(layer.qkv, normed, qkv, rows);
  each(rows, [&](int r) {
    const int slot = r / step.tokens;
    const T* cos = static_cast<const T*>(step.cos) + std::ptrdiff_t(r) * layer.rotary;
    const T* sin = static_cast<const T*>(step.sin) + std::ptrdiff_t(r) * layer.rotary;
    T* row = qkv + std::ptrdiff_t(r) * width;
    for (int h = 0; h < layer.heads + layer.kv_heads; h++) {
      const Norm& own = h < layer.heads ? layer.query : layer.key;
      if (own.weight) norm(own, row + h * dim, row + h * dim, dim);
      rotate(row + h * dim, cos, sin, layer.rotary);
    }
    for (int h = 0; h < layer.kv_heads; h++) {
      T* key = static_cast<T*>(step.keys) + slot * step.key_strides[0] + h * step.key_strides[1];
      T* value = static_cast<T*>(step.values) + slot * step.value_strides[0] + h * step.value_strides[1];
      const T* own = row + (layer.heads + h) * dim;
      std::copy_n(own, dim, key + step.cells[r] * step.key_strides[2]);
      std::copy_n(own + layer.kv_heads * dim, dim, value + step.cells[r] * step.value_strides[2]);
    }
  });

  T* seen = scratch.of(scratch.seen, std::size_t(rows) * layer.heads * dim);
  const std::int64_t strides[9] = {std::int64_t(step.tokens) * width, dim, width,
                                   step.key_strides[0], step.key_strides[1], step.key_strides[2],
                                   step.value_strides[0], step.value_strides[1], step.value_strides[2]};
  const std::int32_t shape[7] = {step.slots, step.tokens, layer.heads, layer.kv_heads, dim, dim, step.context};
  if (regrow_attention(qkv, step.keys, step.values, seen, step.runs, strides, shape, layer.scale, step.is_bf16)) {
    return 1;
  }
  product(layer.out, seen, normed, rows);
  T* sum = scratch.of(scratch.sum, all);
  each(rows, [&](int r) {
    const std::ptrdiff_t at = std::ptrdiff_t(r) * size;
    add(hidden + at, normed + at, sum + at, size);
    norm(layer.after, sum + at, normed + at, size);
  });
  mlp(layer.gate_up, layer.down, normed, normed, rows, scratch);
  each(rows, [&](int r) {
    const std::ptrdiff_t at = std::ptrdiff_t(r) * size;
    add(sum + at, normed + at, static_cast<T*>(step.out) + at, size);
  });
  return 0;
}

}  // namespace
}  // namespace regrow

REGROW_API int regrow_layer(const regrow::Layer* layer, const regrow::Step* step) {
  return step->is_bf16 ? regrow::run<regrow::bf16>(*layer, *step) : regrow::run<float>(*layer, *step);
}

// x and y [rows, inputs or outputs], both bfloat16 or both float32; see `mlp`.
REGROW_API void regrow_mlp(const regrow::Product* gate_up, const regrow::Product* down, const void* x, void* y, int rows,
                           int is_bf16) {
  const auto run = [&](auto* in, auto* out) {
    static thread_local regrow::Scratch<std::remove_pointer_t<decltype(out)>> scratch;
    regrow::mlp(*gate_up, *down, in, out, rows, scratch);
  };
  is_bf16 ? run(static_cast<const regrow::bf16*>(x), static_cast<regrow::bf16*>(y))
          : run(static_cast<const float*>(x), static_cast<float*>(y));
}

// x [rows, 2 size]: gates, then what they are for; y [rows, size] = silu(gate) * other. Both bfloat16 or both float32.
REGROW_API void regrow_gate(const void* x, void* y, int rows, int size, int is_bf16) {
  const auto run = [&](auto* in, auto* out) {
#pragma omp parallel for schedule(static)
    for (int r = 0; r < rows; r++) {
      const auto* row = in + std::ptrdiff_t(r) * 2 * size;
      regrow::gate(row, row + size, out + std::ptrdiff_t(r) * size, size);
    }
  };
  is_bf16 ? run(static_cast<const regrow::bf16*>(x), static_cast<regrow::bf16*>(y))
          : run(static_cast<const float*>(x), static_cast<float*>(y));
}

// x and y [rows, size], both bfloat16 or both float32.
REGROW_API void regrow_norm(const regrow::Norm* norm, const void* x, void* y, std::int64_t rows, int size, int is_bf16) {
  const auto run = [&](auto* in, auto* out) {
#pragma omp parallel for schedule(static) if (rows * size > 32768)
    for (std::int64_t r = 0; r < rows; r++) regrow::norm(*norm, in + r * size, out + r * size, size);
  };
  is_bf16 ? run(static_cast<const regrow::bf16*>(x), static_cast<regrow::bf16*>(y))
          : run(static_cast<const float*>(x), static_cast<float*>(y));
}
