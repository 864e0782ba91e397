// SPDX-License-Identifier: Apache-2.0
// The exact k-th largest key of each row, by a radix histogram over the bits of a float32: 11, 11 and 9 of them, from
// the top. No threshold is guessed and nothing is tried again, so the host never waits.
//
// The first level is counted while p is written. That pass also keeps each tile's largest elements, among which are
// those that can still be selected (candidates.cuh), and what follows reads no others. So an element moves 12 bytes, if
// gradients are float32: 4 of gradient and 4 of residual are read, and 4 of p written. A tile whose candidates are not
// among those is read once more, 4 bytes an element, and one with too many of them four times, 16 bytes; with a loss
// scale all of p is read and written once more, 8 bytes.
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

    __device__ __forceinline__ int bins() const { return 1 << (high - low); }

    __device__ __forceinline__ unsigned int bin(unsigned int key) const { return key >> low & (bins() - 1); }

    __device__ __forceinline__ bool agree(unsigned int key, unsigned int found) const {
        return key >> high == found >> high;
    }
};

// What is known about the smallest key that is selected: complete after the last level, zeros below until then.
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

// How often each bin of a level occurs in what a CUDA block visits. These are integers: their order is of no
// consequence. Between two of the three steps there must be a barrier.
struct Histogram {
    static constexpr int EACH = BINS / BLOCK_THREADS;   // bins of a thread

    Level level;
    unsigned int found;    // of the threshold, by earlier levels
    unsigned int* bins;    // BINS of the block

    __device__ __forceinline__ void clear() const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int bin = static_cast<int>(threadIdx.x) + i * BLOCK_THREADS;
            if (bin < level.bins()) bins[bin] = 0;
        }
    }

    __device__ __forceinline__ void count(float value) const {
        const unsigned int key = key_of(value);
        if (key != 0 && level.agree(key, found)) atomicAdd(&bins[level.bin(key)], 1u);
    }

    __device__ __forceinline__ void add_to(unsigned int* row_bins) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int bin = static_cast<int>(threadIdx.x) + i * BLOCK_THREADS;
            const unsigned int times = bin < level.bins() ? bins[bin] : 0;
            if (times != 0) atomicAdd(&row_bins[bin], times);
        }
    }
};
