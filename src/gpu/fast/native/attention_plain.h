// Attention's products in float32, for any processor and type.
#pragma once

#include <algorithm>

#include "attention.h"

namespace regrow {

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) { return from_bf16(value); }

template <class T>
class Plain {
 public:
  using Element = T;
  static constexpr const auto& POWERS = EXACT;

  void enter() {}
  void leave() {}

  void begin(int dim, int value_dim, int) {
    dim_ = dim, value_dim_ = value_dim, padded_ = round_up(value_dim, DIMS);
    std::fill_n(queries_, std::size_t(ROWS) * dim, 0.0f);
    std::fill_n(sums_, std::size_t(ROWS) * padded_, 0.0f);
  }

  void set_query(int row, const T* q) {
    float* lane = queries_ + std::size_t(row / LANES) * dim_ * LANES + row % LANES;
    for (int d = 0; d < dim_; d++) lane[d * LANES] = to_float(q[d]);
  }

  void take(const T* k, std::ptrdiff_t k_cell, const T* v, std::ptrdiff_t v_cell, int cells) {
    cells_ = cells;
    for (int c = 0; c < cells; c++) {
      for (int d = 0; d < dim_; d++) keys_[c * dim_ + d] = to_float(k[c * k_cell + d]);
      for (int d = 0; d < value_dim_; d++) values_[c * padded_ + d] = to_float(v[c * v_cell + d]);
      for (int d = value_dim_; d < padded_; d++) values_[c * padded_ + d] = 0;
    }
    std::fill_n(keys_ + std::size_t(cells) * dim_, std::size_t(round_up(cells, CELLS) - cells) * dim_, 0.0f);
  }

  template <int TILES>
  void scores(int part, float* s) const {
    for (int t = 0; t < TILES; t++) {
      const float* q = queries_ + std::size_t(part * TILES + t) * dim_ * LANES;
      for (int c = 0; c < cells_; c += CELLS) {
        Lanes sum[CELLS];
        for (auto& one : sum) one = fill(0);
        for (int d = 0; d < dim_; d++) {
          const Lanes query = load(q + d * LANES);
          for (int i = 0; i < CELLS; i++) {
            sum[i] = multiply_add(query, fill(keys_[(c + i) * dim_ + d]), sum[i]);
          }
        }
        for (int i = 0; i < CELLS; i++) store(s + ((c + i) * TILES + t) * LANES, sum[i]);
      }
    }
  }

  template <int TILES>
  void scale(int part, const float* by) {
    for (int t = 0; t < TILES; t++) {
      float* sum = sums_ + std::size_t(part * TILES + t) * padded_ * LANES;
      for (int d = 0; d < padded_; d++) store(sum + d * LANES, multiply(load(sum + d * LANES), load(by + t * LANES)));
    }
  }

  template <int TILES>
  void add(int part, const float* weights) {
    for (int t = 0; t < TILES; t++) {
      float* out = sums_ + std::size_t(part * TILES + t) * padded_ * LANES;
      for (int d = 0; d < padded_; d += DIMS) {
        Lanes sum[DIMS];
        for (int i = 0; i < DIMS; i++) sum[i] = load(out + (d + i) * LANES);
        for (int c = 0; c < cells_; c++) {
          const Lanes weight = load(weights + (c * TILES + t) * LANES);
          for (int i = 0; i < DIMS; i++) {
            sum[i] = multiply_add(weight, fill(values_[c * padded_ + d + i]), sum[i]);
          }
        }
        for (int i = 0; i < DIMS; i++) store(out + (d + i) * LANES, sum[i]);
      }
    }
  }

  float at(int row, int d) const {
    return sums_[(std::size_t(row / LANES) * padded_ + d) * LANES + row % LANES];
  }

  void ahead(int) const {}

 private:
  static constexpr int CELLS = 8, DIMS = 8;  // whose sums are in registers at once

  int dim_, value_dim_, padded_, cells_;
  alignas(64) float queries_[ROWS * MAX_DIM];                  // [16 rows][dim][row]
  alignas(64) float sums_[ROWS * MAX_DIM];                     // [16 rows][dim][row]
  alignas(64) float keys_[BLOCK * MAX_DIM], values_[BLOCK * MAX_DIM];  // [cell][dim]
};

}  // namespace regrow
