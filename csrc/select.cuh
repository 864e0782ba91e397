// The exact k-th largest key of each row, by a radix histogram over the bits of a float32: 11, 11 and 9 of them, from
// the top. No threshold is guessed and nothing is tried again, so the host never waits.
//
// Zeros are not counted: many threads would wait for one bin, and where the other keys are too few the search ends at
// the key zero anyway. Among equal keys those with the lowest index are selected. So what lies behind the elements of a
// row may count as zero, too: a row has enough zeros before it.
#pragma once

#include "sparse_rows.cuh"

constexpr int BINS = 2048;

// Which bits of a key tell its bin: [low, high). What lies above is what earlier levels have found.
struct Level {
    int low;
    int high;

    __device__ __forceinline__ explicit Level(long long level)
        : low(level == 0 ? 20 : level == 1 ? 9 : 0), high(level == 0 ? 31 : level == 1 ? 20 : 9) {}

    __device__ __forceinline__ unsigned int bin(unsigned int key) const {
        return key >> low & ((1u << (high - low)) - 1);
    }

    __device__ __forceinline__ bool agree(unsigned int key, unsigned int found) const {
        return key >> high == found >> high;
    }
};

// What is known about the smallest key that is selected: complete after the last level.
struct Threshold {
    unsigned int key;
    unsigned int wanted;       // how many keys are to be selected among those that agree with it; the first ones are
    unsigned int not_finite;   // whether the row has infinities or NaNs
    unsigned int unused;
};

// Elements of a tile, or of all tiles before it in its row.
struct Counts {
    unsigned int above;   // the threshold
    unsigned int equal;
};

// Count the tile's keys into their row's bins. The counts are integers: their order is of no consequence.
__device__ __forceinline__ void count_keys(const Team& team, const Tile& tile, const Level& level, unsigned int found,
                                           unsigned int* row_bins) {
    __shared__ unsigned int bins[BINS];
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) bins[bin] = 0;
    __syncthreads();
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            const unsigned int key = key_of(tile.value[group][k]);
            if (key != 0 && level.agree(key, found)) atomicAdd(&bins[level.bin(key)], 1u);
        }
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
        if (bins[bin] != 0) atomicAdd(&row_bins[bin], bins[bin]);
    }
}
