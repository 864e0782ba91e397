// SPDX-License-Identifier: Apache-2.0
// Sparse payload rows, or the sum of several, back to values: part by part in shared memory, so that what few entries
// change is written once and whole.
#pragma once

#include "strip.cuh"

constexpr int SUM_NUMEL = 2 * TILE_NUMEL;   // in shared memory at a time: so many that threads find entries to add

// The part of a row of the values that a CUDA block has.
struct SummedPart {
    long long row;
    long long region;
    int from;      // its first element, within its region
    int present;   // how many of its elements exist
    long long begin;

    __device__ __forceinline__ SummedPart(long long chunk_numel, long long numel) {
        const unsigned int parts = static_cast<unsigned int>((chunk_numel + SUM_NUMEL - 1) / SUM_NUMEL);
        row = blockIdx.x / parts;
        const long long first = static_cast<long long>(blockIdx.x % parts) * SUM_NUMEL;
        region = first / REGION_NUMEL;
        from = static_cast<int>(first % REGION_NUMEL);
        begin = row * chunk_numel + first;
        const long long inside = min(chunk_numel - first, static_cast<long long>(SUM_NUMEL));
        present = static_cast<int>(max(0ll, min(numel - begin, inside)));
    }
};

// Entries of a row: those of one part, and some of its neighbours.
struct Entries {
    int begin;
    int end;
};

// Find the entries for elements [from, from + SUM_NUMEL) of a region. A warp looks at 32 entries at equal distances,
// once: indices ascend, so between two of them lie the part's first one and its last one.
__device__ __forceinline__ Entries entries_near(const SparseRow& row, long long region, int from) {
    const int begin = region == 0 ? 0 : row.ends()[region - 1];
    const int end = row.ends()[region];
    const int distance = (end - begin + LANES - 1) / LANES;
    const int probe = begin + lane_of_thread() * distance;
    const int element = probe < end ? row.indices()[probe] : REGION_NUMEL;
    const int before = __popc(vote(element < from));
    const int until = __popc(vote(element < from + SUM_NUMEL));
    return {begin + max(before - 1, 0) * distance, min(begin + until * distance, end)};
}

// An entry's value and its element of the part; below 0 or from SUM_NUMEL on, it is another part's.
struct Entry {
    int element = -1;
    float value = 0.0f;

    __device__ __forceinline__ void read(const SparseRow& row, int entry, int from) {
        element = row.indices()[entry] - from;
        value = row.value(entry);
    }

    __device__ __forceinline__ void add_to(float* sums) const {
        if (0 <= element && element < SUM_NUMEL) sums[element] = __fadd_rn(sums[element], value);
    }
};

// Add what one row has of a part. `first` is the thread's first entry, read before.
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

// sparse_decode: one CUDA block of 256 threads per part of each row of the values. Row r of them is the sum of rows r
// to r + peers - 1 of the payload, in this order; no element occurs twice in a row. Only float32 may have several
// peers.
extern "C" __global__ void sparse_decode(unsigned char* payload, long long row_stride, long long chunk_numel,
                                         long long entries, long long value_dtype, long long peers, void* values,
                                         long long dtype, long long numel) {
    __shared__ float sums[SUM_NUMEL];
    __shared__ Entries found[MAX_WARPS];
    const SummedPart part(chunk_numel, numel);
    const int from = part.from;
    const auto row_of = [&](int peer) {
        return SparseRow(payload, row_stride, part.row + peer, chunk_numel, entries, value_dtype);
    };
#pragma unroll
    for (int i = 0; i < SUM_NUMEL / BLOCK_THREADS; ++i) sums[threadIdx.x + i * BLOCK_THREADS] = 0.0f;
    const int count = static_cast<int>(peers);
    for (int begin = 0; begin < count; begin += MAX_WARPS) {   // a warp searches for each row
        if (begin + warp_of_thread() < count) {
            const Entries near = entries_near(row_of(begin + warp_of_thread()), part.region, from);
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
        case FLOAT32: return write_values(sums, static_cast<float*>(values) + part.begin, part.present);
        case FLOAT16: return write_values(sums, static_cast<Half*>(values) + part.begin, part.present);
        default: return write_values(sums, static_cast<Bfloat16*>(values) + part.begin, part.present);
    }
}
