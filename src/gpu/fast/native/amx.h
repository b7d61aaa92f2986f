// The tile unit (AMX): a tile is 16 rows of 64 bytes, and one instruction multiplies two of them.
#pragma once

#include "common.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define REGROW_TILES 1

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace regrow {

constexpr int TILE = 512;  // bfloat16 elements of a tile

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

// A thread's eight tiles, all of full size; `leave` gives back what was there before, since others keep theirs
// between calls.
class TileUnit {
 public:
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

 private:
  alignas(64) std::uint8_t before_[64];
};

// Indices that put 16 elements of two vectors in turn, from the first on.
inline __m512i interleave(int first) {
  const __m512i ascending = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i even = _mm512_add_epi32(ascending, _mm512_set1_epi32(first));
  return _mm512_or_si512(even, _mm512_slli_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(32)), 16));
}

// Indices that put the two halves of one vector in turn.
inline __m512i interleave_halves() { return _mm512_sub_epi16(interleave(0), _mm512_set1_epi32(16 << 16)); }

// Sixteen vectors of 16 words (32 bits) as the 16 words of each place: out[64 bytes of a place].
inline void turn_words(const __m512i* in, bf16* out) {
  __m512i r[16], s[16];
  for (int i = 0; i < 8; i++) {
    s[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
    s[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
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

}  // namespace regrow
#endif
