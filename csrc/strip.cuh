// SPDX-License-Identifier: Apache-2.0
// How a warp takes its elements: 32 neighbours a step, one for each lane.
//
// Every access of the warp is whole wherever the memory begins, and ballots give each element its place.
#pragma once

#include "sparse_rows.cuh"

constexpr int STEPS = WARP_NUMEL / LANES;

__device__ __forceinline__ int lane_of_thread() { return static_cast<int>(threadIdx.x) % LANES; }

__device__ __forceinline__ int warp_of_thread() { return static_cast<int>(threadIdx.x) / LANES; }

__device__ __forceinline__ unsigned int vote(bool condition) { return __ballot_sync(0xFFFFFFFFu, condition); }

// How many of the bits, one for each lane, are of lanes before this one.
__device__ __forceinline__ unsigned int before_lane(unsigned int bits) {
    return __popc(bits & ((1u << lane_of_thread()) - 1));
}

__device__ __forceinline__ float load_streaming(const float* at) { return __ldcs(at); }

__device__ __forceinline__ Half load_streaming(const Half* at) { return {__ldcs(&at->bits)}; }

__device__ __forceinline__ Bfloat16 load_streaming(const Bfloat16* at) { return {__ldcs(&at->bits)}; }

// What a lane holds: elements in ascending order by step, then by lane.
template <int COUNT>
struct Strip {
    float value[COUNT];
};

// WARP_NUMEL elements of a tile.
template <typename T>
struct Share {
    T* at;         // the lane's first element
    int element;   // which of the tile it is
    int left;      // how many of the tile exist from there on

    __device__ __forceinline__ Share(T* memory, const Span& span, int first)
        : at(memory + span.begin + first + lane_of_thread()),
          element(first + lane_of_thread()),
          left(span.present - element) {}

    __device__ __forceinline__ bool exists(int step) const { return step * LANES < left; }

    // What does not exist is +0. All loads leave before the first is waited for.
    __device__ __forceinline__ Strip<STEPS> read() const {
        Strip<STEPS> strip;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            strip.value[step] = exists(step) ? to_float(at[step * LANES]) : 0.0f;
        }
        return strip;
    }

    // The same, of memory that nothing reads again soon: it leaves the cache first.
    __device__ __forceinline__ Strip<STEPS> read_once() const {
        if (!exists(STEPS - 1)) return read();
        decltype(load_streaming(at)) raw[STEPS];
#pragma unroll
        for (int step = 0; step < STEPS; ++step) raw[step] = load_streaming(at + step * LANES);
        Strip<STEPS> strip;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) strip.value[step] = to_float(raw[step]);
        return strip;
    }

    __device__ __forceinline__ void write(const Strip<STEPS>& strip) const {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (exists(step)) at[step * LANES] = strip.value[step];
        }
    }
};

// The warp's share of a tile that a CUDA block of MAX_WARPS warps takes.
template <typename T>
__device__ __forceinline__ Share<T> warp_share(T* memory, const Span& span) {
    return Share<T>(memory, span, warp_of_thread() * WARP_NUMEL);
}
