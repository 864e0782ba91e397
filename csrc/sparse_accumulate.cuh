// SPDX-License-Identifier: Apache-2.0
// What is to be sent: values, and what was left out before. One pass, which also begins the selection.
#pragma once

#include "candidates.cuh"

// Residuals are kept unscaled, so that they survive a change of the loss scale.
struct Past {
    const float* residual;          // null: none
    double decay;
    const float* loss_scale;        // null: 1
};

// Turn the gradients g in `strip` into p = g + decay v, with v times the loss scale. Every product and every sum is
// rounded by itself, the product of the two factors first.
struct Addition {
    float factor;
    Strip<STEPS> residual;

    // Ask for the past.
    __device__ __forceinline__ Addition(const Past& past, const Span& span) : factor(1.0f), residual{} {
        if (past.residual == nullptr) return;
        residual = warp_share(past.residual, span).read_once();
        factor = static_cast<float>(past.decay);
        if (past.loss_scale != nullptr) factor = __fmul_rn(*past.loss_scale, factor);
    }

    __device__ __forceinline__ void add_residual(Strip<STEPS>& strip) const {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            strip.value[step] = __fadd_rn(strip.value[step], __fmul_rn(residual.value[step], factor));
        }
    }
};

// The gradients times `scale`.
template <typename T>
__device__ __forceinline__ Strip<STEPS> gradients(const void* values, double scale, const Span& span) {
    Strip<STEPS> strip = warp_share(static_cast<const T*>(values), span).read_once();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        strip.value[step] = __fmul_rn(strip.value[step], static_cast<float>(scale));
    }
    return strip;
}

__device__ __forceinline__ Strip<STEPS> gradients(const void* values, long long dtype, double scale, const Span& span) {
    switch (dtype) {   // equal in all threads
        case FLOAT32: return gradients<float>(values, scale, span);
        case FLOAT16: return gradients<Half>(values, scale, span);
        default: return gradients<Bfloat16>(values, scale, span);
    }
}

// The lowest key of the first level from which on a tile has no more elements than slots. All threads must call; `bins`
// are the tile's.
__device__ __forceinline__ unsigned int floor_of(const unsigned int* bins) {
    __shared__ unsigned int floor;
    constexpr int EACH = BINS / BLOCK_THREADS;
    const int top = BINS - 1 - static_cast<int>(threadIdx.x) * EACH;   // downwards: largest keys first
    unsigned int counts[EACH];
    unsigned int sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        counts[i] = bins[top - i];
        sum += counts[i];
    }
    unsigned int above = scan_block(sum).before;
    const bool last = threadIdx.x == BLOCK_THREADS - 1;
    if (above <= CAPACITY && (above + sum > CAPACITY || last)) {   // one thread
        int bin = top + 1;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            above += counts[i];
            if (above <= CAPACITY) bin = top - i;
        }
        floor = static_cast<unsigned int>(bin) << Level(0).low;
    }
    __syncthreads();
    return floor;
}

// Keep a tile's largest elements. `share` and `strip` are the warp's part of it. All threads must call.
__device__ __forceinline__ void keep_largest(const Share<float>& share, const Strip<STEPS>& strip, unsigned int floor,
                                             Candidates& target) {
    const auto keeps = [&](int step) { return key_of(strip.value[step]) >= max(floor, 1u); };
    unsigned int of_warp = 0;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) of_warp += __popc(vote(keeps(step)));
    const Scanned slots = scan_warps(of_warp);
    unsigned int slot = slots.before;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        slot = target.append(keeps(step), strip.value[step], share.element + step * LANES, slot);
    }
    if (threadIdx.x == 0) {
        target.number = slots.total;
        target.floor = floor;
    }
}

// sparse_accumulate: one CUDA block of 256 threads per tile. Writes p, and the bins of the first level, which must be
// zero before; and keeps the tile's largest elements.
extern "C" __global__ void sparse_accumulate(const void* values, long long dtype, long long numel, double scale,
                                             long long chunk_numel, const float* residual, double decay,
                                             const float* loss_scale, float* p, unsigned int* bins,
                                             Candidates* candidates) {
    __shared__ unsigned int block_bins[BINS];
    const Span span(chunk_numel, numel, blockIdx.x);
    // Before the gradients: all loads leave before the first is waited for.
    const Addition addition({residual, decay, loss_scale}, span);
    Strip<STEPS> strip = gradients(values, dtype, scale, span);
    if (residual != nullptr) addition.add_residual(strip);
    const Share<float> share = warp_share(p, span);
    share.write(strip);
    const Histogram histogram{Level(0), 0, block_bins};
    histogram.clear();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        if (share.exists(step)) histogram.count(strip.value[step]);
    }
    __syncthreads();
    histogram.add_to(bins + span.row * BINS);
    keep_largest(share, strip, floor_of(block_bins), candidates[blockIdx.x]);
}
