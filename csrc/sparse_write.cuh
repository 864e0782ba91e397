// Write what was selected into payload rows, in ascending order of its elements, and keep what that leaves out.
#pragma once

#include "scan.cuh"
#include "select.cuh"

// What a thread holds of its tile, a bit per element in the order of Tile: bit group * WIDTH + k.
struct Chosen {
    unsigned int above;   // the threshold
    unsigned int equal;
};

__device__ __forceinline__ Chosen compare(const Tile& tile, unsigned int least) {
    Chosen chosen{0, 0};
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            const unsigned int key = key_of(tile.value[group][k]);
            const unsigned int bit = 1u << (group * WIDTH + k);
            if (key > least) chosen.above |= bit;
            if (key == least) chosen.equal |= bit;
        }
    }
    return chosen;
}

// How many bits of all threads come before the bits of each group of this thread. A warp's elements are in the order
// group, lane, k, and come before those of the next warp.
struct Before {
    unsigned int group[GROUPS];

    __device__ __forceinline__ explicit Before(unsigned int bits) {
        static_assert(GROUPS == 4 && GROUP_STRIDE < 256, "the counts of all groups fit into the bytes of a word");
        unsigned int counts = 0;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) counts |= __popc(bits >> i * WIDTH & ((1u << WIDTH) - 1)) << 8 * i;
        const unsigned int inclusive = inclusive_in_warp(counts);
        const unsigned int earlier = inclusive - counts;   // byte by byte: none is larger in `counts`
        const unsigned int of_warp = last_of_warp(inclusive);
        unsigned int start = scan_warps(sum_of_bytes(of_warp)).before;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            group[i] = start + (earlier >> 8 * i & 0xFFu);
            start += of_warp >> 8 * i & 0xFFu;
        }
    }

    static __device__ __forceinline__ unsigned int sum_of_bytes(unsigned int word) {
        return (word & 0xFFu) + (word >> 8 & 0xFFu) + (word >> 16 & 0xFFu) + (word >> 24);
    }

    static __device__ __forceinline__ unsigned int last_of_warp(unsigned int value) {
        return __shfl_sync(0xFFFFFFFFu, value, LANES - 1);
    }
};

// sparse_write: one CUDA block of 256 threads per tile. `before` tells what earlier tiles of the row have. With `keeps`
// p becomes the new residual: without a loss scale it changes only where something is sent. There the velocity, if any,
// becomes zero.
extern "C" __global__ void sparse_write(float* p, long long numel, long long chunk_numel, const Threshold* thresholds,
                                        const Counts* before, unsigned char* payload, long long row_stride,
                                        long long entries, long long value_dtype, long long keeps,
                                        const float* loss_scale, float* velocity) {
    const Team team = form_team(TILE_NUMEL);
    const Span span(chunk_numel, numel);
    const Threshold threshold = thresholds[span.row];
    const SparseRow target(payload, row_stride, span.row, chunk_numel, entries, value_dtype);
    Tile tile;
    load(team, p + span.begin, span.present, 1.0f, tile);
    const Chosen chosen = compare(tile, threshold.key);
    const Before above(chosen.above);
    const Before equal(chosen.equal);
    const unsigned int first = static_cast<unsigned int>(span.tile % REGION_TILES * TILE_NUMEL);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        unsigned int larger = before[blockIdx.x].above + above.group[group];
        unsigned int ties = before[blockIdx.x].equal + equal.group[group];
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            const unsigned int bit = 1u << (group * WIDTH + k);
            const int element = team.element(group) + k;
            if ((chosen.above & bit) != 0 || ((chosen.equal & bit) != 0 && ties < threshold.wanted)) {
                const unsigned int entry = larger + min(ties, threshold.wanted);
                const bool spoils = entry == 0 && threshold.not_finite != 0;
                float& value = tile.value[group][k];
                target.indices()[entry] = static_cast<unsigned short>(first + element);
                value = __fsub_rn(value, target.write_value(entry, spoils ? __uint_as_float(0x7FC00000u) : value));
                if (element < span.present) {
                    if (keeps) p[span.begin + element] = value;
                    if (velocity != nullptr) velocity[span.begin + element] = 0.0f;
                }
            }
            larger += (chosen.above & bit) != 0;
            ties += (chosen.equal & bit) != 0;
        }
    }
    if (keeps && loss_scale != nullptr) {
        const float inverse = __fdiv_rn(1.0f, *loss_scale);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) tile.value[group][k] = __fmul_rn(tile.value[group][k], inverse);
        }
        store(team, tile, p + span.begin, span.present);
    }
}
