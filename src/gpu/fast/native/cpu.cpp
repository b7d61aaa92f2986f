// Says whether this machine has the instructions that the library was built with.
#include "common.h"

#define NEEDS(macro_defined, name) (!(macro_defined) || __builtin_cpu_supports(name))

#ifdef __AVX512F__
#define HAS_F 1
#else
#define HAS_F 0
#endif
#ifdef __AVX512VNNI__
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif
#ifdef __AVX512BF16__
#define HAS_BF16 1
#else
#define HAS_BF16 0
#endif
#ifdef __AVX512BW__
#define HAS_BW 1
#else
#define HAS_BW 0
#endif
#ifdef __AVX512VL__
#define HAS_VL 1
#else
#define HAS_VL 0
#endif
#ifdef __AVX2__
#define HAS_AVX2 1
#else
#define HAS_AVX2 0
#endif
#ifdef __FMA__
#define HAS_FMA 1
#else
#define HAS_FMA 0
#endif

REGROW_API int regrow_runs_here() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return NEEDS(HAS_AVX2, "avx2") && NEEDS(HAS_FMA, "fma") && NEEDS(HAS_F, "avx512f") &&
         NEEDS(HAS_VNNI, "avx512vnni") && NEEDS(HAS_BF16, "avx512bf16") && NEEDS(HAS_BW, "avx512bw") &&
         NEEDS(HAS_VL, "avx512vl");
#else
  return 1;
#endif
}
