// Copies of cells by all threads.
#include "copy.h"

#include <vector>

#include "common.h"

namespace regrow {

// `rows` rows of `size` bytes, whose beginnings are so many bytes apart. As in copying.py.
struct Copy {
  char* to;
  const char* from;
  std::int64_t to_stride, from_stride, rows, size;
};

}  // namespace regrow

REGROW_API void regrow_copy(const regrow::Copy* copies, int count) {
  constexpr std::int64_t BLOCK = 64 * 1024;      // bytes, of one thread
  constexpr std::int64_t SMALL = 3 * 512 * 1024;  // bytes, copied sooner than a thread that sleeps is there
  struct Block {
    char* to;
    const char* from;
    std::int64_t size;
  };
  static thread_local std::vector<Block> blocks;
  blocks.clear();
  std::int64_t all = 0;
  for (const auto* copy = copies; copy < copies + count; copy++) {
    all += copy->rows * copy->size;
    for (std::int64_t row = 0; row < copy->rows; row++) {
      for (std::int64_t at = 0; at < copy->size; at += BLOCK) {
        blocks.push_back({copy->to + row * copy->to_stride + at, copy->from + row * copy->from_stride + at,
                          std::min(BLOCK, copy->size - at)});
      }
    }
  }
  const Block* const first = blocks.data();
  const std::int64_t number = blocks.size();
#pragma omp parallel for schedule(static) if (all > SMALL)
  for (std::int64_t i = 0; i < number; i++) regrow::copy_past_caches(first[i].to, first[i].from, first[i].size);
}
