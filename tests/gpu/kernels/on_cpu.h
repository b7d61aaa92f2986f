// What a kernel needs of CUDA, for one thread after another on the CPU. Reads and writes of a word that are not
// aligned, which a GPU refuses, are counted (-fsanitize=alignment).
#define __global__
#define __device__

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
struct Index {
    unsigned int x;
};
static Index blockIdx, threadIdx, blockDim, gridDim;
static long long misaligned;

extern "C" void __ubsan_handle_type_mismatch_v1(void*, void*) { misaligned++; }
