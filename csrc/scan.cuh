// SPDX-License-Identifier: Apache-2.0
// Sums over what comes before a thread, in a warp and in a CUDA block of MAX_WARPS warps.
#pragma once

#include "team.cuh"

// The sum over this lane and those before it.
__device__ __forceinline__ unsigned int inclusive_in_warp(unsigned int value) {
    const int lane = static_cast<int>(threadIdx.x) % LANES;
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
        const unsigned int other = __shfl_up_sync(0xFFFFFFFFu, value, distance);
        if (lane >= distance) value += other;
    }
    return value;
}

struct Scanned {
    unsigned int before;   // the sum over the threads before this one
    unsigned int total;
};

// Every thread must call. `of_warp` gives the warp's sum in its last lane.
__device__ __forceinline__ Scanned scan_warps(unsigned int of_warp) {
    __shared__ unsigned int sums[MAX_WARPS];
    const int warp = static_cast<int>(threadIdx.x) / LANES;
    __syncthreads();   // the last call's readers are done
    if (threadIdx.x % LANES == LANES - 1) sums[warp] = of_warp;
    __syncthreads();
    Scanned result{0, 0};
#pragma unroll
    for (int other = 0; other < MAX_WARPS; ++other) {
        if (other < warp) result.before += sums[other];
        result.total += sums[other];
    }
    return result;
}

__device__ __forceinline__ Scanned scan_block(unsigned int value) {
    const unsigned int inclusive = inclusive_in_warp(value);
    Scanned result = scan_warps(inclusive);
    result.before += inclusive - value;
    return result;
}
