// Weights times many rows on the tile unit (AMX), in bfloat16 and summed in float32.
//
// 32 outputs of a weight at a time are laid out for the unit where the thread's cache has them, and all rows are
// multiplied by them; so a packed weight is never unpacked in memory. Each sum is taken over the inputs in their order.
#include <algorithm>
#include <vector>

#include "amx.h"
#include "linear.h"
#include "tiles.h"

#ifdef REGROW_TILES

namespace regrow {
namespace {

constexpr int ROWS = 16;  // of a tile

// A block of a packed weight as a tile: [16 pairs of inputs][16 outputs][2].
template <int BITS>
void lay_block(const std::uint8_t* block, bf16* out) {
  const auto halves = [&](int at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + code_bytes(BITS) + at)));
  };
  const __m512 scale = halves(0), offset = halves(2 * OUTPUTS);
  const __m512i in_turn = interleave_halves(), low = _mm512_set1_epi32(BITS == 8 ? 255 : 15);
  for (int i = 0; i < INPUTS / 4; i++) {  // four inputs of each output
    const std::uint8_t* codes = block + 64 * (BITS == 8 ? i : i / 2);
    const __m512i four = _mm512_srl_epi32(_mm512_loadu_si512(codes), _mm_cvtsi32_si128(BITS == 8 ? 0 : i % 2 * 4));
    __m512 weight[4];
    for (int j = 0; j < 4; j++) {
      const __m512 code = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(four, 8 * j), low));
      weight[j] = _mm512_add_ps(_mm512_mul_ps(scale, code), offset);
    }
    for (int j = 0; j < 4; j += 2) {
      const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh(weight[j + 1], weight[j]);
      _mm512_store_si512(out + 64 * i + 16 * j, _mm512_permutexvar_epi16(in_turn, pair));
    }
  }
}

// 32 inputs of up to 16 outputs of a weight [outputs, inputs] as such a tile.
void lay_plain(const bf16* w, std::ptrdiff_t inputs, int outputs, bf16* out) {
  __m512i of[16];
  for (int o = 0; o < 16; o++) of[o] = o < outputs ? _mm512_loadu_si512(w + o * inputs) : _mm512_setzero_si512();
  turn_words(of, out);
}

// The 16 outputs from `first` on as tiles [inputs / 32]; zeros where there are none.
template <int BITS>
void lay_outputs(const Product& product, int first, bf16* out) {
  const int blocks = product.inputs / INPUTS, count = std::min(OUTPUTS, product.outputs - first);
  if constexpr (BITS == 16) {
    const bf16* w = static_cast<const bf16*>(product.weight) + std::ptrdiff_t(first) * product.inputs;
    for (int b = 0; b < blocks; b++) lay_plain(w + b * INPUTS, product.inputs, count, out + std::size_t(b) * TILE);
  } else if (count <= 0) {
    std::fill_n(out, std::size_t(blocks) * TILE, bf16(0));
  } else {
    const auto* block = static_cast<const std::uint8_t*>(product.weight);
    block += std::size_t(first / OUTPUTS) * blocks * block_bytes(BITS);
    for (int b = 0; b < blocks; b++, block += block_bytes(BITS)) lay_block<BITS>(block, out + std::size_t(b) * TILE);
  }
}

// x [rows, inputs] as tiles [rows / 16 rounded up to even][inputs / 32][16 rows][32 inputs], zeros behind the last row.
// One item is 16 rows.
void pack_rows(const bf16* x, bf16* out, int item, int rows, int inputs) {
  const int blocks = inputs / INPUTS;
  out += std::size_t(item) * blocks * TILE;
  for (int r = 0; r < ROWS; r++) {
    const int row = item * ROWS + r;
    for (int b = 0; b < blocks; b++) {
      bf16* to = out + std::size_t(b) * TILE + r * INPUTS;
      if (row < rows) {
        std::copy_n(x + std::ptrdiff_t(row) * inputs + b * INPUTS, INPUTS, to);
      } else {
        std::fill_n(to, INPUTS, bf16(0));
      }
    }
  }
}

// sums [32 rows][32 outputs] of two tiles of rows and two of the weight over all inputs.
void multiply_tiles(const bf16* x, const bf16* w, int blocks, float* sums) {
  const std::ptrdiff_t next = std::ptrdiff_t(blocks) * TILE;
  memory_is_touched();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int b = 0; b < blocks; b++, x += TILE, w += TILE) {
    _tile_loadd(4, x, 64);
    _tile_loadd(6, w, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w + next, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x + next, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  _tile_stored(2, sums + 16 * 32, 128);
  _tile_stored(3, sums + 16 * 32 + 16, 128);
  memory_is_touched();
}

template <int BITS>
void run(const Product& product, const bf16* x, bf16* y, int rows) {
  static thread_local std::vector<bf16> packed_rows;
  const int inputs = product.inputs, outputs = product.outputs, blocks = inputs / INPUTS;
  const int pairs = (rows + 2 * ROWS - 1) / (2 * ROWS);
  const std::size_t size = std::size_t(blocks) * TILE;
  if (packed_rows.size() < 2 * pairs * size) packed_rows.resize(2 * pairs * size);
  bf16* const given = packed_rows.data();  // the caller's, not each thread's own
#pragma omp parallel
  {
    static thread_local std::vector<bf16> laid;
    if (laid.size() < 2 * size + 32) laid.resize(2 * size + 32);
    bf16* const w = laid.data() + (64 - reinterpret_cast<std::uintptr_t>(laid.data()) % 64) / sizeof(bf16);
    alignas(64) float sums[2 * ROWS * 2 * OUTPUTS];
    TileUnit unit;
    unit.enter();
#pragma omp for schedule(static)
    for (int item = 0; item < 2 * pairs; item++) pack_rows(x, given, item, rows, inputs);
#pragma omp for schedule(dynamic)
    for (int first = 0; first < outputs; first += 2 * OUTPUTS) {
      lay_outputs<BITS>(product, first, w);
      lay_outputs<BITS>(product, first + OUTPUTS, w + size);
      const int count = std::min(2 * OUTPUTS, outputs - first);
      const __mmask32 some = count == 32 ? ~__mmask32(0) : (__mmask32(1) << count) - 1;
      __m512 bias[2] = {};
      for (int i = 0; i < 2 && product.bias; i++) {
        bias[i] = _mm512_maskz_loadu_ps(__mmask16(some >> 16 * i), product.bias + first + 16 * i);
      }
      for (int pair = 0; pair < pairs; pair++) {
        multiply_tiles(given + 2 * pair * size, w, blocks, sums);
        for (int r = 0; r < std::min(2 * ROWS, rows - pair * 2 * ROWS); r++) {
          const __m512 low = _mm512_add_ps(_mm512_load_ps(sums + 32 * r), bias[0]);
          const __m512 high = _mm512_add_ps(_mm512_load_ps(sums + 32 * r + 16), bias[1]);
          bf16* to = y + std::ptrdiff_t(pair * 2 * ROWS + r) * outputs + first;
          _mm512_mask_storeu_epi16(to, some, (__m512i)_mm512_cvtne2ps_pbh(high, low));
        }
      }
    }
    unit.leave();
  }
}

}  // namespace

bool takes_many(const Product& product) { return product.inputs % INPUTS == 0 && tiles_allowed(); }

void multiply_many(const Product& product, const bf16* x, bf16* y, int rows) {
  switch (product.bits) {
    case 4: return run<4>(product, x, y, rows);
    case 8: return run<8>(product, x, y, rows);
    default: return run<16>(product, x, y, rows);
  }
}

}  // namespace regrow

#else

namespace regrow {
bool takes_many(const Product&) { return false; }
void multiply_many(const Product&, const bf16*, bf16*, int) {}
}  // namespace regrow

#endif
