// One token of each of a few rows through a gated delta net: projections, causal convolution, gated delta rule, gated
// norm, projection. Convolution and recurrent states are changed where they lie.
#include <algorithm>
#include <cmath>
#include <vector>

#include "linear.h"
#include "norm.h"

namespace regrow {

// Fields of both are those of the structures in delta.py.
//
// in: outputs queries, keys, values, gates of the output (then others). rates: float32 [2, v_heads, inputs], of beta and
// of the decay; convolution: float32 [channels, width]; decay, bias: float32 [v_heads], of the decay's rate.
struct Delta {
  Product in, out;
  Norm norm;
  const float *rates, *convolution, *decay, *bias;
  std::int32_t k_heads, v_heads, k_dim, v_dim, width;
};

// hidden [rows, size] in and out; columns: the convolution's state [rows, channels, width], in the type of the hidden
// states; state: float32 [rows, v_heads, k_dim, v_dim].
struct DeltaStep {
  const void* hidden;
  void *out, *columns;
  float* state;
  std::int64_t columns_stride, state_stride;  // of a row, in elements
  std::int32_t rows, is_bf16;
};

namespace {

constexpr int MAX_HEAD = 256;

inline float silu(float x) { return x / (1 + std::exp(-x)); }

template <class T>
float dot(const T* x, const float* w, int size) {
  constexpr int PARTS = 16;
  float parts[PARTS] = {}, total = 0;
  int i = 0;
  for (; i + PARTS <= size; i += PARTS) {
    for (int j = 0; j < PARTS; j++) parts[j] += get(x + i + j) * w[i + j];
  }
  for (; i < size; i++) total += get(x + i) * w[i];
  for (float part : parts) total += part;
  return total;
}

// Takes one column in and leaves the convolution's result, with its SiLU, in its place.
template <class T>
void convolve(T* x, T* columns, const float* weight, int width) {
  float sum = 0;
  for (int i = 0; i + 1 < width; i++) {
    columns[i] = columns[i + 1];
    sum += get(columns + i) * weight[i];
  }
  columns[width - 1] = *x;
  set(x, silu(rounded<T>(sum + get(x) * weight[width - 1])));
}

// Scales x to length 1, times `by`.
template <class T>
void unit(const T* x, float by, float* y, int size) {
  float sum = 0;
  for (int i = 0; i < size; i++) sum += get(x + i) * get(x + i);
  const float scale = by / std::sqrt(sum + 1e-6f);
  for (int i = 0; i < size; i++) y[i] = get(x + i) * scale;
}

// state = decay * state + key x (beta * (value - key . decay * state)); out = query . state.
void rule(float* state, const float* query, const float* key, float decay, float beta, float* value, float* out,
          int k_dim, int v_dim) {
  std::fill_n(out, v_dim, 0.0f);
  for (int k = 0; k < k_dim; k++) {
    float* row = state + std::ptrdiff_t(k) * v_dim;
    for (int v = 0; v < v_dim; v++) {
      row[v] *= decay;
      out[v] += row[v] * key[k];
    }
  }
  for (int v = 0; v < v_dim; v++) {
    value[v] = (value[v] - out[v]) * beta;
    out[v] = 0;
  }
  for (int k = 0; k < k_dim; k++) {
    float* row = state + std::ptrdiff_t(k) * v_dim;
    for (int v = 0; v < v_dim; v++) {
      row[v] += key[k] * value[v];
      out[v] += row[v] * query[k];
    }
  }
}

template <class T>
void run(const Delta& delta, const DeltaStep& step) {
  static thread_local std::vector<T> projected, seen;
  const int size = delta.in.inputs, width = delta.in.outputs, k_dim = delta.k_dim, v_dim = delta.v_dim;
  const int keys = delta.k_heads * k_dim, values = delta.v_heads * v_dim, channels = 2 * keys + values;
  const T* hidden = static_cast<const T*>(step.hidden);
  projected.resize(std::max(projected.size(), std::size_t(step.rows) * width));
  seen.resize(std::max(seen.size(), std::size_t(step.rows) * values));
  T *all = projected.data(), *results = seen.data();
  multiply(delta.in, hidden, all, step.rows);
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < std::int64_t(step.rows) * channels; i++) {
    const std::int64_t row = i / channels, channel = i % channels;
    T* columns = static_cast<T*>(step.columns) + row * step.columns_stride + channel * delta.width;
    convolve(all + row * width + channel, columns, delta.convolution + channel * delta.width, delta.width);
  }
#pragma omp parallel for schedule(static)
  for (int i = 0; i < step.rows * delta.v_heads; i++) {
    const int row = i / delta.v_heads, head = i % delta.v_heads, from = head / (delta.v_heads / delta.k_heads);
    const T *own = all + std::ptrdiff_t(row) * width, *x = hidden + std::ptrdiff_t(row) * size;
    float query[MAX_HEAD], key[MAX_HEAD], value[MAX_HEAD], result[MAX_HEAD];
    unit(own + from * k_dim, 1 / std::sqrt(float(k_dim)), query, k_dim);
    unit(own + keys + from * k_dim, 1, key, k_dim);
    for (int v = 0; v < v_dim; v++) value[v] = get(own + 2 * keys + head * v_dim + v);
    const float b = rounded<T>(dot(x, delta.rates + std::ptrdiff_t(head) * size, size));
    const float a = rounded<T>(dot(x, delta.rates + std::ptrdiff_t(delta.v_heads + head) * size, size));
    const float rate = a + delta.bias[head], soft = rate > 20 ? rate : std::log1p(std::exp(rate));
    rule(step.state + row * step.state_stride + std::ptrdiff_t(head) * k_dim * v_dim, query, key,
         std::exp(delta.decay[head] * soft), rounded<T>(1 / (1 + std::exp(-b))), value, result, k_dim, v_dim);
    T normed[MAX_HEAD];
    for (int v = 0; v < v_dim; v++) set(normed + v, result[v]);
    norm(delta.norm, normed, normed, v_dim);
    const T* gate = own + channels + head * v_dim;
    T* out = results + std::ptrdiff_t(row) * values + head * v_dim;
    for (int v = 0; v < v_dim; v++) set(out + v, get(normed + v) * silu(get(gate + v)));
  }
  multiply(delta.out, results, static_cast<T*>(step.out), step.rows);
}

}  // namespace
}  // namespace regrow

REGROW_API void regrow_delta(const regrow::Delta* delta, const regrow::DeltaStep* step) {
  step->is_bf16 ? regrow::run<regrow::bf16>(*delta, *step) : regrow::run<float>(*delta, *step);
}
