// One decoder layer for a chunk, or for one token of each of a few slots: norm, attention, norm, gated MLP; and its norms
// and its MLP alone, for layers of other shapes.
//
// A layer is otherwise some eighty small operations, whose fixed costs are most of a step's time. Results are rounded to
// the type of the hidden states where the operations they stand for would do so.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "norm.h"

REGROW_API int regrow_attention(const void*, const void*, const void*, void*, const std::int32_t*, const std::int64_t*,
                                const std::int32_t*, float, int, const regrow::Lent*);

namespace regrow {

// Fields of both are those of the structures in layer.py.
struct Layer {
  Product qkv, out, gate_up, down;
  Norm before, after, query, key;
  std::int32_t heads, kv_heads, dim, rotary;
  float scale;
};

// A layer's arenas [slots, kv_heads, cells, dim], with strides in elements, and what is lent to the only row there is.
struct Cells {
  void *keys, *values;
  std::int64_t key_strides[3], value_strides[3];  // slot, head, cell
  Lent lent;
};

// hidden [slots, tokens, size] in and out, which may be one, cos and sin [slots, tokens, rotary]; cells int64 [slots,
// tokens]: where a token's own goes; runs int32 [2, slots, tokens]: the cells it sees. first: the slot of the first row.
struct Call {
  const void* hidden;
  void* out;
  const void *cos, *sin;
  const std::int64_t* cells;
  const std::int32_t* runs;
  std::int32_t first, slots, tokens, context, is_bf16;  // context: cells of an arena
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
int run(const Layer& layer, const Cells& cells, const Call& call, const void* given) {
  static thread_local Scratch<T> scratch;
  const int rows = call.slots * call.tokens, size = layer.qkv.inputs, dim = layer.dim;
  const std::ptrdiff_t all = std::ptrdiff_t(rows) * size;
  const T* hidden = static_cast<const T*>(given);
  T* const keys = static_cast<T*>(cells.keys) + call.first * cells.key_strides[0];
  T* const values = static_cast<T*>(cells.values) + call.first * cells.value_strides[0];
  T* normed = scratch.of(scratch.normed, all);
  each(rows, [&](int r) {
    const std::ptrdiff_t at = std::ptrdiff_t(r) * size;
    norm(layer.before, hidden + at, normed + at, size);
  });

  const int width = layer.qkv.outputs;
  T* qkv = scratch.of(scratch.qkv, std::size_t(rows) * width);
  product(layer.qkv, normed, qkv, rows);
  each(rows, [&](int r) {
    const int slot = r / call.tokens;
    const T* cos = static_cast<const T*>(call.cos) + std::ptrdiff_t(r) * layer.rotary;
    const T* sin = static_cast<const T*>(call.sin) + std::ptrdiff_t(r) * layer.rotary;
    T* row = qkv + std::ptrdiff_t(r) * width;
    for (int h = 0; h < layer.heads + layer.kv_heads; h++) {
      const Norm& own = h < layer.heads ? layer.query : layer.key;
      if (own.weight) norm(own, row + h * dim, row + h * dim, dim);
      rotate(row + h * dim, cos, sin, layer.rotary);
    }
    for (int h = 0; h < layer.kv_heads; h++) {
      T* key = keys + slot * cells.key_strides[0] + h * cells.key_strides[1];
      T* value = values + slot * cells.value_strides[0] + h * cells.value_strides[1];
      const T* own = row + (layer.heads + h) * dim;
      std::copy_n(own, dim, key + call.cells[r] * cells.key_strides[2]);
      std::copy_n(own + layer.kv_heads * dim, dim, value + call.cells[r] * cells.value_strides[2]);
    }
  });

  T* seen = scratch.of(scratch.seen, std::size_t(rows) * layer.heads * dim);
  const std::int64_t strides[9] = {std::int64_t(call.tokens) * width, dim, width,
                                   cells.key_strides[0], cells.key_strides[1], cells.key_strides[2],
                                   cells.value_strides[0], cells.value_strides[1], cells.value_strides[2]};
  const std::int32_t shape[7] = {call.slots, call.tokens, layer.heads, layer.kv_heads, dim, dim, call.context};
  if (regrow_attention(qkv, keys, values, seen, call.runs, strides, shape, layer.scale, call.is_bf16,
                       cells.lent.stop ? &cells.lent : nullptr)) {
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
    add(sum + at, normed + at, static_cast<T*>(call.out) + at, size);
  });
  return 0;
}

}  // namespace
}  // namespace regrow

// Layers that follow each other. Returns 1 where attention refuses its runs of cells.
REGROW_API int regrow_layers(const regrow::Layer* const* layers, const regrow::Cells* cells, int count,
                             const regrow::Call* call) {
  for (int i = 0; i < count; i++) {
    const void* hidden = i ? call->out : call->hidden;
    const int refused = call->is_bf16 ? regrow::run<regrow::bf16>(*layers[i], cells[i], *call, hidden)
                                      : regrow::run<float>(*layers[i], cells[i], *call, hidden);
    if (refused) return 1;
  }
  return 0;
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
