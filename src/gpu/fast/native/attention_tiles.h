// Attention's products in bfloat16 on the tile unit (AMX), summed in float32.
//
// Keys are loaded as they lie in the cells: scores are keys [16 cells][32 dims] times
// queries [16 pairs of dims][16 rows]. For the sums the weights, rounded, are turned into [16 rows][32 cells], and the
// values packed as [16 pairs of cells][16 dims].
#pragma once

#include "amx.h"
#include "attention.h"

#ifdef REGROW_TILES

#include <algorithm>

namespace regrow {

class Tiles {
 public:
  using Element = bf16;
  static constexpr const auto& POWERS = SHORT;

  void enter() { unit_.enter(); }
  void leave() { unit_.leave(); }

  void begin(int dim, int value_dim, int rows) {
    dim_ = dim, steps_ = round_up(dim, 32) / 32, value_dim_ = value_dim, width_ = round_up(value_dim, 32);
    const int tiles = (round_up(rows, 2 * LANES)) / LANES;
    std::fill_n(queries_, std::size_t(tiles) * steps_ * TILE, bf16(0));
    std::fill_n(sums_, std::size_t(tiles) * LANES * width_, 0.0f);
  }

  void set_query(int row, const bf16* q) {
    bf16* lane = queries_ + std::size_t(row / LANES) * steps_ * TILE + row % LANES * 2;
    for (int d = 0; d < dim_; d++) lane[d / 2 * 2 * LANES + d % 2] = q[d];
  }

  void take(const bf16* k, std::ptrdiff_t k_cell, const bf16* v, std::ptrdiff_t v_cell, int cells) {
    groups_ = round_up(cells, GROUP) / GROUP;
    next_[0] = k + BLOCK * k_cell, next_[1] = v + BLOCK * v_cell, next_cell_[0] = k_cell, next_cell_[1] = v_cell;
    ahead_ = 0;
    keys_ = k, key_stride_ = k_cell;
    // Groups from here on are copied with zeros behind: the last cells, or all where tiles do not fit the dims.
    copied_ = dim_ % 32 ? 0 : cells / GROUP;
    for (int c = copied_ * GROUP; c < groups_ * GROUP; c++) {
      bf16* to = copy_ + std::size_t(c) * steps_ * 32;
      const int count = c < cells ? dim_ : 0;
      std::copy_n(k + c * k_cell, count, to);
      std::fill(to + count, to + steps_ * 32, bf16(0));
    }
    const __m512i low = interleave(0), high = interleave(16);
    for (int d = 0; d < width_; d += 32) {
      const int dims = std::clamp(value_dim_ - d, 0, 32);
      const __mmask32 some = dims == 32 ? ~__mmask32(0) : (__mmask32(1) << dims) - 1;
      for (int c = 0; c < groups_ * GROUP; c += 2) {
        const bf16* pair = v + c * v_cell + d;
        ahead(1);
        const __m512i a = _mm512_maskz_loadu_epi16(c < cells ? some : 0, pair);
        const __m512i b = _mm512_maskz_loadu_epi16(c + 1 < cells ? some : 0, pair + v_cell);
        bf16* to = values_ + (std::size_t(c / GROUP) * width_ + d) / 16 * TILE + c % GROUP * 16;
        _mm512_store_si512(to, _mm512_permutex2var_epi16(a, low, b));
        _mm512_store_si512(to + TILE, _mm512_permutex2var_epi16(a, high, b));
      }
    }
  }

  template <int TILES>
  void scores(int part, float* s) const {
    const bf16* q = queries_ + std::size_t(part) * TILES * steps_ * TILE;
    constexpr int STRIDE = TILES * LANES * 4;
    memory_is_touched();
    for (int g = 0; g < groups_; g++, s += GROUP * TILES * LANES) {
      const bool direct = g < copied_;
      ahead(8);
      const std::ptrdiff_t cell = direct ? key_stride_ : steps_ * 32;
      const bf16* k = (direct ? keys_ : copy_) + g * GROUP * cell;
      _tile_zero(0);
      _tile_zero(2);
      if (TILES == 2) {
        _tile_zero(1);
        _tile_zero(3);
      }
      for (int i = 0; i < steps_; i++) {
        _tile_loadd(4, k + 32 * i, cell * 2);
        _tile_loadd(5, k + 32 * i + 16 * cell, cell * 2);
        _tile_loadd(6, q + i * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        if (TILES == 2) {
          _tile_loadd(7, q + (steps_ + i) * TILE, 64);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, s, STRIDE);
      _tile_stored(2, s + LANES * TILES * LANES, STRIDE);
      if (TILES == 2) {
        _tile_stored(1, s + LANES, STRIDE);
        _tile_stored(3, s + LANES * TILES * LANES + LANES, STRIDE);
      }
    }
    memory_is_touched();
  }

  template <int TILES>
  void scale(int part, const float* by) {
    float* sum = sums_ + std::size_t(part) * TILES * LANES * width_;
    for (int row = 0; row < TILES * LANES; row++, sum += width_) {
      for (int d = 0; d < width_; d += LANES) store(sum + d, multiply(load(sum + d), fill(by[row])));
    }
  }

  template <int TILES>
  void add(int part, const float* weights) {
    for (int g = 0; g < groups_; g++) {
      for (int t = 0; t < TILES; t++) {
        ahead(12);
        turn(weights + (g * GROUP * TILES + t) * LANES, TILES * LANES, weights_ + (g * TILES + t) * TILE);
      }
    }
    float* sum = sums_ + std::size_t(part) * TILES * LANES * width_;
    memory_is_touched();
    for (int d = 0; d < width_; d += 32) {
      _tile_loadd(0, sum + d, width_ * 4);
      _tile_loadd(1, sum + d + 16, width_ * 4);
      if (TILES == 2) {
        _tile_loadd(2, sum + LANES * width_ + d, width_ * 4);
        _tile_loadd(3, sum + LANES * width_ + d + 16, width_ * 4);
      }
      for (int g = 0; g < groups_; g++) {
        const bf16* v = values_ + (std::size_t(g) * width_ + d) / 16 * TILE;
        _tile_loadd(4, weights_ + g * TILES * TILE, 64);
        _tile_loadd(6, v, 64);
        _tile_loadd(7, v + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (TILES == 2) {
          _tile_loadd(5, weights_ + (g * TILES + 1) * TILE, 64);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, sum + d, width_ * 4);
      _tile_stored(1, sum + d + 16, width_ * 4);
      if (TILES == 2) {
        _tile_stored(2, sum + LANES * width_ + d, width_ * 4);
        _tile_stored(3, sum + LANES * width_ + d + 16, width_ * 4);
      }
    }
    memory_is_touched();
  }

  // Asks the memory for some more keys and values of the next block. It takes as long as all that is computed on a block
  // of one row, so it is spread over that: asked for at once, they would only be waited for at once.
  void ahead(int cells) const {
    for (int i = 0; i < cells && ahead_ < 2 * BLOCK; i++, ahead_++) {
      const int of = ahead_ & 1;
      const char* at = reinterpret_cast<const char*>(next_[of] + (ahead_ >> 1) * next_cell_[of]);
      for (int line = 0; line < dim_ * 2; line += 64) _mm_prefetch(at + line, _MM_HINT_T1);
    }
  }

  float at(int row, int d) const { return sums_[std::size_t(row) * width_ + d]; }

 private:
  static constexpr int GROUP = 32;  // cells that a tile of weights has

  // weights[32 cells][16 rows] (of `stride` floats) to out[16 rows][32 cells], rounded.
  static void turn(const float* weights, int stride, bf16* out) {
    const __m512i halves = interleave_halves();
    __m512i pairs[16];
    for (int i = 0; i < 16; i++) {  // a pair of cells for each row
      const __m512 even = _mm512_loadu_ps(weights + 2 * i * stride), odd = _mm512_loadu_ps(weights + (2 * i + 1) * stride);
      pairs[i] = _mm512_permutexvar_epi16(halves, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
    }
    turn_words(pairs, out);
  }

  const bf16* next_[2];  // the keys and values of the next block
  std::ptrdiff_t next_cell_[2];
  mutable int ahead_;    // how many of them were asked for
  int dim_, steps_, value_dim_, width_, groups_, copied_;
  const bf16* keys_;
  std::ptrdiff_t key_stride_;
  TileUnit unit_;
  alignas(64) bf16 queries_[ROWS * MAX_DIM];           // [16 rows][32 dims][pair][row][2]
  alignas(64) bf16 copy_[BLOCK * MAX_DIM];             // [cell][dim]
  alignas(64) bf16 values_[BLOCK * MAX_DIM];           // [32 cells][16 dims][pair][dim][2]
  alignas(64) bf16 weights_[BLOCK * 2 * LANES];        // [32 cells][16 rows][row][cell]
  alignas(64) float sums_[ROWS * MAX_DIM];             // [row][dim]
};

}  // namespace regrow
#endif
