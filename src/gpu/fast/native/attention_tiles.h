// Attention's products in bfloat16 on the tile unit (AMX), summed in float32.
//
// A tile is 16 rows of 64 bytes. Keys are loaded as they lie in the cells: scores are keys [16 cells][32 dims] times
// queries [16 pairs of dims][16 rows]. For the sums the weights, rounded, are turned into [16 rows][32 cells], and the
// values packed as [16 pairs of cells][16 dims].
#pragma once

#include "attention.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define REGROW_TILES 1

#include <algorithm>
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace regrow {

// Asks the system once for the right to use tiles; false where this processor or system has none.
inline bool tiles_allowed() {
  static const bool allowed = [] {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM
    unsigned a, b, c, d;
    const bool there = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
    return there && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  }();
  return allowed;
}

// Tile instructions say nothing of memory to the compiler: no store may move across them.
inline void memory_is_touched() { __asm__ volatile("" ::: "memory"); }

class Tiles {
 public:
  using Element = bf16;
  static constexpr const auto& POWERS = SHORT;

  // Configures the thread's tiles; `leave` gives back what was there before, since others keep theirs between calls.
  void enter() {
    struct alignas(64) {
      std::uint8_t palette = 1, start = 0, zero[14] = {};
      std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } wanted;
    _tile_storeconfig(before_);
    memory_is_touched();
    _tile_loadconfig(&wanted);
  }
  void leave() {
    memory_is_touched();
    if (before_[0]) {
      _tile_loadconfig(before_);
    } else {
      _tile_release();
    }
  }

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

  float at(int row, int d) const { return sums_[std::size_t(row) * width_ + d]; }

 private:
  static constexpr int GROUP = 32;  // cells that a tile of weights has
  static constexpr int TILE = 512;  // elements

  // Indices that put 16 elements of two vectors in turn, from the first on.
  static __m512i interleave(int first) {
    const __m512i ascending = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i even = _mm512_add_epi32(ascending, _mm512_set1_epi32(first));
    return _mm512_or_si512(even, _mm512_slli_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(32)), 16));
  }

  // weights[32 cells][16 rows] (of `stride` floats) to out[16 rows][32 cells], rounded.
  static void turn(const float* weights, int stride, bf16* out) {
    const __m512i halves = _mm512_sub_epi16(interleave(0), _mm512_set1_epi32(16 << 16));  // of one vector, in turn
    __m512i r[16], s[16];
    for (int i = 0; i < 16; i++) {  // a pair of cells for each row
      const __m512 even = _mm512_loadu_ps(weights + 2 * i * stride), odd = _mm512_loadu_ps(weights + (2 * i + 1) * stride);
      r[i] = _mm512_permutexvar_epi16(halves, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
    }
    for (int i = 0; i < 8; i++) {
      s[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
      s[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
      r[4 * i] = _mm512_unpacklo_epi64(s[4 * i], s[4 * i + 2]);
      r[4 * i + 1] = _mm512_unpackhi_epi64(s[4 * i], s[4 * i + 2]);
      r[4 * i + 2] = _mm512_unpacklo_epi64(s[4 * i + 1], s[4 * i + 3]);
      r[4 * i + 3] = _mm512_unpackhi_epi64(s[4 * i + 1], s[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
      s[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
      s[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
      s[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
      s[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
      _mm512_storeu_si512(out + 32 * i, _mm512_shuffle_i32x4(s[i], s[8 + i], 0x88));
      _mm512_storeu_si512(out + 32 * (8 + i), _mm512_shuffle_i32x4(s[i], s[8 + i], 0xdd));
      _mm512_storeu_si512(out + 32 * (4 + i), _mm512_shuffle_i32x4(s[4 + i], s[12 + i], 0x88));
      _mm512_storeu_si512(out + 32 * (12 + i), _mm512_shuffle_i32x4(s[4 + i], s[12 + i], 0xdd));
    }
  }

  int dim_, steps_, value_dim_, width_, groups_, copied_;
  const bf16* keys_;
  std::ptrdiff_t key_stride_;
  alignas(64) std::uint8_t before_[64];
  alignas(64) bf16 queries_[ROWS * MAX_DIM];           // [16 rows][32 dims][pair][row][2]
  alignas(64) bf16 copy_[BLOCK * MAX_DIM];             // [cell][dim]
  alignas(64) bf16 values_[BLOCK * MAX_DIM];           // [32 cells][16 dims][pair][dim][2]
  alignas(64) bf16 weights_[BLOCK * 2 * LANES];        // [32 cells][16 rows][row][cell]
  alignas(64) float sums_[ROWS * MAX_DIM];             // [row][dim]
};

}  // namespace regrow
#endif
