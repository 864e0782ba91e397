// SPDX-License-Identifier: Apache-2.0
// Sparse payload rows, or the sum of several, back to values: tile by tile in shared memory, so that what few entries
// change is written once and whole.
#pragma once

#include "strip.cuh"

// Entries of a row: those of one tile, and some of its neighbours.
struct Entries {
    int begin;
    int end;
};

// Find the entries for elements [from, from + TILE_NUMEL) of a region. A warp looks at 32 entries at equal distances,
// once: indices ascend, so between two of them lie the tile's first one and its last one.
__device__ __forceinline__ Entries entries_near(const SparseRow& row, long long region, int from) {
    const int begin = region == 0 ? 0 : row.ends()[region - 1];
    const int end = row.ends()[region];
    const int distance = (end - begin + LANES - 1) / LANES;
    const int probe = begin + lane_of_thread() * distance;
    const int element = probe < end ? row.indices()[probe] : REGION_NUMEL;
    const int before = __popc(vote(element < from));
    const int until = __popc(vote(element < from + TILE_NUMEL));
    return {begin + max(before - 1, 0) * distance, min(begin + until * distance, end)};
}

// An entry's value and its element of the tile; below 0 or from TILE_NUMEL on, it is another tile's.
struct Entry {
    int element = -1;
    float value = 0.0f;

    __device__ __forceinline__ void read(const SparseRow& row, int entry, int from) {
        element = row.indices()[entry] - from;
        value = row.value(entry);
    }

    __device__ __forceinline__ void add_to(float* sums) const {
        if (0 <= element && element < TILE_NUMEL) sums[element] = __fadd_rn(sums[element], value);
    }
};

// Add what one row has of a tile. `first` is the thread's first entry, read before.
__device__ __forceinline__ void add_row(const SparseRow& row, const Entries& entries, int from, const Entry& first,
                                        float* sums) {
    first.add_to(sums);
    for (int entry = entries.begin + threadIdx.x + BLOCK_THREADS; entry < entries.end; entry += BLOCK_THREADS) {
        Entry next;
        next.read(row, entry, from);
        next.add_to(sums);
    }
}

template <typename T>
__device__ __forceinline__ void write_values(const float* sums, T* values, int present) {
    for (int element = threadIdx.x; element < present; element += BLOCK_THREADS) {
        values[element] = from_float<T>(sums[element]);
    }
}

// sparse_decode: one CUDA block of 256 threads per tile of each row of the values. Row r of them is the sum of rows r to
// r + peers - 1 of the payload, in this order; no element occurs twice in a row. Only float32 may have several peers.
extern "C" __global__ void sparse_decode(unsigned char* payload, long long row_stride, long long chunk_numel,
                                         long long entries, long long value_dtype, long long peers, void* values,
                                         long long dtype, long long numel) {
    __shared__ float sums[TILE_NUMEL];
    __shared__ Entries found[MAX_WARPS];
    const Span span(chunk_numel, numel, blockIdx.x);
    const int from = static_cast<int>(span.tile % REGION_TILES) * TILE_NUMEL;
    const auto row_of = [&](int peer) {
        return SparseRow(payload, row_stride, span.row + peer, chunk_numel, entries, value_dtype);
    };
#pragma unroll
    for (int i = 0; i < TILE_NUMEL / BLOCK_THREADS; ++i) sums[threadIdx.x + i * BLOCK_THREADS] = 0.0f;
    const int count = static_cast<int>(peers);
    for (int begin = 0; begin < count; begin += MAX_WARPS) {   // a warp searches for each row
        if (begin + warp_of_thread() < count) {
            const Entries near = entries_near(row_of(begin + warp_of_thread()), span.tile / REGION_TILES, from);
            if (lane_of_thread() == 0) found[warp_of_thread()] = near;
        }
        __syncthreads();
        Entry first[MAX_WARPS];   // of all rows: they leave together
#pragma unroll
        for (int i = 0; i < MAX_WARPS; ++i) {
            if (begin + i >= count) continue;
            const int entry = found[i].begin + static_cast<int>(threadIdx.x);
            if (entry < found[i].end) first[i].read(row_of(begin + i), entry, from);
        }
#pragma unroll
        for (int i = 0; i < MAX_WARPS; ++i) {
            if (begin + i >= count) continue;
            add_row(row_of(begin + i), found[i], from, first[i], sums);
            __syncthreads();   // the next row may have the same elements
        }
    }
    switch (dtype) {
        case FLOAT32: return write_values(sums, static_cast<float*>(values) + span.begin, span.present);
        case FLOAT16: return write_values(sums, static_cast<Half*>(values) + span.begin, span.present);
        default: return write_values(sums, static_cast<Bfloat16*>(values) + span.begin, span.present);
    }
}
