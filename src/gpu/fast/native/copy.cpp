// Copies of cells past the caches: nobody reads them again soon, and a line that is only written need not be read.
#include <algorithm>

#include "common.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace regrow {
namespace {

constexpr std::int64_t BLOCK = 64 * 1024;  // bytes, of one thread

#if defined(__AVX512F__)
constexpr std::int64_t LINE = 64, AHEAD = 32 * LINE;

void copy(char* to, const char* from, std::int64_t size) {
  const std::int64_t head = std::min<std::int64_t>(-reinterpret_cast<std::intptr_t>(to) & (LINE - 1), size);
  std::memcpy(to, from, head);
  std::int64_t i = head;
  for (; i + LINE <= size; i += LINE) {
    _mm_prefetch(from + i + AHEAD, _MM_HINT_T0);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
  }
  std::memcpy(to + i, from + i, size - i);
  _mm_sfence();
}
#else
void copy(char* to, const char* from, std::int64_t size) { std::memcpy(to, from, size); }
#endif

}  // namespace
}  // namespace regrow

// Copies `rows` rows of `size` bytes; their beginnings are so many bytes apart.
REGROW_API void regrow_copy(char* to, const char* from, std::int64_t to_stride, std::int64_t from_stride, int rows,
                            std::int64_t size) {
  using regrow::BLOCK;
  const std::int64_t blocks = (size + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) if (rows * size > BLOCK)
  for (std::int64_t i = 0; i < rows * blocks; i++) {
    const std::int64_t row = i / blocks, at = i % blocks * BLOCK;
    regrow::copy(to + row * to_stride + at, from + row * from_stride + at, std::min(BLOCK, size - at));
  }
}
