// A copy past the caches: a line that is only written need not be read, and nobody reads it again soon.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace regrow {

#if defined(__AVX512F__)
inline void copy_past_caches(char* to, const char* from, std::int64_t size) {
  constexpr std::int64_t LINE = 64, AHEAD = 32 * LINE;
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
inline void copy_past_caches(char* to, const char* from, std::int64_t size) { std::memcpy(to, from, size); }
#endif

}  // namespace regrow
