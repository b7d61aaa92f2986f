// What the two forms of attention share: its call, its blocks, and what a form has to offer.
//
// The queries of the heads that share a key head, and of neighbouring tokens, are rows of one block of at most ROWS;
// the lanes of a vector are 16 of them. Scores lie as [cell][row], so that nothing is summed or compared across
// lanes. A form (`Plain`, `Tiles`) keeps queries and sums of a block and multiplies:
//
//   begin(dim, value_dim, rows)           all sums are zero
//   set_query(row, q)
//   take(k, k_cell, v, v_cell, cells)     at most BLOCK cells; nothing behind them is read
//   scores<TILES>(part, s)                s[cell][row] of the rows of a part, TILES x 16 of them
//   scale<TILES>(part, by)                sums of each row times by[row]
//   add<TILES>(part, weights)             sums of each row plus weights[cell][row] times values
//   ahead(cells)                          asks for so many more keys or values of the next block
//   at(row, d)                            a sum
#pragma once

#include <cstddef>
#include <cstdint>

#include "common.h"
#include "lanes.h"

namespace regrow {

constexpr int BLOCK = 128;
constexpr int ROWS = 256;
constexpr int MAX_DIM = 256;

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Cells [start, stop) of a layer of one slot that lie elsewhere: `keys` and `values` are where the cell 0 of head 0 would
// be, with strides in elements for head and cell. None of them where stop is 0. As in layer.py.
struct Lent {
  const void *keys, *values;
  std::int64_t key_strides[2], value_strides[2];
  std::int32_t start, stop;

  // Blocks that are lent as a whole.
  int first_cell() const { return round_up(start, BLOCK); }
  int end_cell() const { return stop / BLOCK * BLOCK; }
  bool has(int cell) const { return first_cell() <= cell && cell < end_cell(); }
};

}  // namespace regrow
