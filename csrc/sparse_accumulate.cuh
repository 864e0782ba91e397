// SPDX-License-Identifier: Apache-2.0
// What is to be sent: values, what was left out before, and their velocity. One pass, which also begins the selection.
#pragma once

#include "select.cuh"
#include "strip.cuh"

// Residuals and velocities are kept unscaled, so that they survive a change of the loss scale.
struct Past {
    const float* residual;          // null: none
    double decay;
    const float* velocity;          // null: none
    float* fresh_velocity;
    double momentum;
    long long nesterov;
    const float* loss_scale;        // null: 1
};

// Turn the gradients g in `strip` into p = g + decay v, or w + decay v with the velocity w = momentum u + g, or
// w + g + decay v with w = momentum (u + g), Nesterov's: u and v times the loss scale. Every product and every sum is
// rounded by itself, products of two factors first.
struct Addition {
    const Past& past;
    float scale;
    Strip<STEPS> residual;
    Strip<STEPS> velocity;

    // Ask for the past.
    __device__ __forceinline__ Addition(const Past& past, const Span& span)
        : past(past), scale(1.0f), residual{}, velocity{} {
        if (past.residual != nullptr) residual = warp_share(past.residual, span).read_once();
        if (past.velocity != nullptr) velocity = warp_share(past.velocity, span).read_once();
        if (past.loss_scale != nullptr) scale = *past.loss_scale;
    }

    __device__ __forceinline__ void add_velocity(const Share<float>& fresh, Strip<STEPS>& strip) const {
        const float momentum = static_cast<float>(past.momentum);
        const float inverse = __fdiv_rn(1.0f, scale);
        const float factor = past.nesterov ? scale : __fmul_rn(scale, momentum);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            float& p = strip.value[step];
            const float sum = __fadd_rn(__fmul_rn(velocity.value[step], factor), p);
            const float w = past.nesterov ? __fmul_rn(momentum, sum) : sum;
            p = past.nesterov ? __fadd_rn(w, p) : w;
            if (fresh.exists(step)) __stcs(fresh.at + step * LANES, __fmul_rn(w, inverse));   // p is to stay cached
        }
    }

    __device__ __forceinline__ void add_residual(Strip<STEPS>& strip) const {
        const float factor = __fmul_rn(scale, static_cast<float>(past.decay));
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

// sparse_accumulate: one CUDA block of 256 threads per tile. Writes p, the new velocity, and the bins of the first
// level, which must be zero before.
extern "C" __global__ void sparse_accumulate(const void* values, long long dtype, long long numel, double scale,
                                             long long chunk_numel, const float* residual, double decay,
                                             const float* velocity, float* fresh_velocity, double momentum,
                                             long long nesterov, const float* loss_scale, float* p,
                                             unsigned int* bins) {
    __shared__ unsigned int block_bins[BINS];
    const Span span(chunk_numel, numel, blockIdx.x);
    const Past past{residual, decay, velocity, fresh_velocity, momentum, nesterov, loss_scale};
    const Addition addition(past, span);   // before the gradients: all loads leave before the first is waited for
    Strip<STEPS> strip = gradients(values, dtype, scale, span);
    if (velocity != nullptr) addition.add_velocity(warp_share(fresh_velocity, span), strip);
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
