// SPDX-License-Identifier: Apache-2.0
// What is to be sent: values, and what was left out before. One pass, which also begins the selection.
#pragma once

#include "select.cuh"
#include "strip.cuh"

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

// sparse_accumulate: one CUDA block of 256 threads per tile. Writes p, and the bins of the first level, which must be
// zero before.
extern "C" __global__ void sparse_accumulate(const void* values, long long dtype, long long numel, double scale,
                                             long long chunk_numel, const float* residual, double decay,
                                             const float* loss_scale, float* p, unsigned int* bins) {
    __shared__ unsigned int block_bins[BINS];
    const Span span(chunk_numel, numel, blockIdx.x);
    const Addition addition({residual, decay, loss_scale}, span);   // before the gradients: all loads leave before the first is waited for
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
}
