// Copies many runs of bytes in one launch: the spans of every layer's K and V, strided or not, either way.
//
// A part is one tensor: `runs` of it begin from_stride bytes apart where they come from and to_stride bytes
// apart where they go. A tile is at most tile_bytes (a multiple of 16) of one run; tiles are numbered through
// all parts, and block b copies the tiles b, b + gridDim.x, ... What is copied must not overlap.
//
// No headers: NVRTC and nvcc compile this for a GPU, a C++ compiler for the tests.

struct Part {
    const char* from;
    char* to;
    long long from_stride;
    long long to_stride;
    long long bytes;       // of one run, at least 1
    long long first_tile;  // rising
};

// Copies `bytes` with the threads of a block. Both ends must be equally far from a multiple of sizeof(Word):
// single bytes up to the first such place, words, and again single bytes.
template <typename Word>
__device__ void copy_words(char* __restrict__ to, const char* __restrict__ from, long long bytes) {
    const long long size = sizeof(Word);
    long long head = (size - (long long)((unsigned long long)to % size)) % size;
    head = head < bytes ? head : bytes;
    const long long words = (bytes - head) / size;
    Word* __restrict__ to_words = (Word*)(to + head);
    const Word* __restrict__ from_words = (const Word*)(from + head);
    for (long long i = threadIdx.x; i < head; i += blockDim.x) to[i] = from[i];
#pragma unroll 4
    for (long long i = threadIdx.x; i < words; i += blockDim.x) to_words[i] = from_words[i];
    for (long long i = head + words * size + threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

extern "C" __global__ void copy_spans(const Part* parts, long long count, long long tiles, long long tile_bytes) {
    for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        long long low = 0, high = count - 1;  // the last part whose first tile is not beyond this one
        while (low < high) {
            const long long middle = (low + high + 1) / 2;
            if (parts[middle].first_tile <= tile)
                low = middle;
            else
                high = middle - 1;
        }
        const Part part = parts[low];
        const long long tiles_of_run = (part.bytes + tile_bytes - 1) / tile_bytes;
        const long long run = (tile - part.first_tile) / tiles_of_run;
        const long long at = (tile - part.first_tile) % tiles_of_run * tile_bytes;
        const long long left = part.bytes - at;
        const long long bytes = left < tile_bytes ? left : tile_bytes;
        char* to = part.to + run * part.to_stride + at;
        const char* from = part.from + run * part.from_stride + at;
        const unsigned long long apart = (unsigned long long)to ^ (unsigned long long)from;
        if (apart % 16 == 0)
            copy_words<uint4>(to, from, bytes);
        else if (apart % 8 == 0)
            copy_words<unsigned long long>(to, from, bytes);
        else if (apart % 4 == 0)
            copy_words<unsigned int>(to, from, bytes);
        else if (apart % 2 == 0)
            copy_words<unsigned short>(to, from, bytes);
        else
            copy_words<char>(to, from, bytes);
    }
}
