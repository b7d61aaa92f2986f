extern "C" long long launch(
    unsigned int grid, unsigned int block, const Part* parts, long long count, long long tiles, long long tile_bytes
) {
    misaligned = 0;
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++) copy_spans(parts, count, tiles, tile_bytes);
    return misaligned;
}
