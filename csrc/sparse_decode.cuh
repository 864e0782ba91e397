// SPDX-License-Identifier: Apache-2.0
// Sparse payload rows, or the sum of several, back to values.
#pragma once

#include "sparse_rows.cuh"

// The entries of a region in one row.
struct Entries {
    int begin;
    int end;

    __device__ __forceinline__ Entries(const SparseRow& row, long long region)
        : begin(region == 0 ? 0 : row.ends()[region - 1]), end(row.ends()[region]) {}
};

template <typename T>
__device__ __forceinline__ void add_entries(unsigned char* payload, long long row_stride, long long row,
                                            long long chunk_numel, long long entries, long long value_dtype,
                                            long long peers, T* values, long long region, int present) {
    SparseRow source(payload, row_stride, row, chunk_numel, entries, value_dtype);
    Entries here(source, region);
    for (int element = threadIdx.x; element < present; element += blockDim.x) values[element] = from_float<T>(0.0f);
    for (long long peer = 0; peer < peers; ++peer) {
        const SparseRow following(payload, row_stride, row + min(peer + 1, peers - 1), chunk_numel, entries,
                                  value_dtype);
        const Entries next(following, region);   // under way while these are added
        __syncthreads();                         // the zeros, or the last row, are in place
        for (int entry = here.begin + threadIdx.x; entry < here.end; entry += blockDim.x) {
            const int element = source.indices()[entry];
            if (element >= present) continue;   // a zero from behind the end
            values[element] = from_float<T>(__fadd_rn(to_float(values[element]), source.value(entry)));
        }
        source = following;
        here = next;
    }
}

// sparse_decode: one CUDA block per region of each row of the values. Row r of them is the sum of rows r to
// r + peers - 1 of the payload, in this order; no element occurs twice in a row. Only float32 may have several peers.
extern "C" __global__ void sparse_decode(unsigned char* payload, long long row_stride, long long chunk_numel,
                                         long long entries, long long value_dtype, long long peers, void* values,
                                         long long dtype, long long numel) {
    const long long regions = (chunk_numel + REGION_NUMEL - 1) / REGION_NUMEL;
    const long long row = blockIdx.x / regions;
    const long long region = blockIdx.x % regions;
    const long long first = region * REGION_NUMEL;
    const long long begin = row * chunk_numel + first;
    const long long inside = min(chunk_numel - first, static_cast<long long>(REGION_NUMEL));
    const int present = static_cast<int>(max(0ll, min(numel - begin, inside)));
    switch (dtype) {
        case FLOAT32:
            return add_entries(payload, row_stride, row, chunk_numel, entries, value_dtype, peers,
                               static_cast<float*>(values) + begin, region, present);
        case FLOAT16:
            return add_entries(payload, row_stride, row, chunk_numel, entries, value_dtype, peers,
                               static_cast<Half*>(values) + begin, region, present);
        default:
            return add_entries(payload, row_stride, row, chunk_numel, entries, value_dtype, peers,
                               static_cast<Bfloat16*>(values) + begin, region, present);
    }
}
