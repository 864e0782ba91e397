// What is to be sent: values, what was left out before, and their velocity. One pass, which also begins the selection.
#pragma once

#include "select.cuh"
#include "values.cuh"

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

// Turn the gradients g in `tile` into p = g + decay v, or w + decay v with the velocity w = momentum u + g, or
// w + g + decay v with w = momentum (u + g), Nesterov's: u and v times the loss scale. Every product and every sum is
// rounded by itself, products of two factors first.
__device__ __forceinline__ void add_past(const Team& team, const Past& past, const Span& span, Tile& tile) {
    const float scale = past.loss_scale == nullptr ? 1.0f : *past.loss_scale;
    if (past.velocity != nullptr) {
        const float momentum = static_cast<float>(past.momentum);
        const float inverse = __fdiv_rn(1.0f, scale);
        Tile velocity;
        load(team, past.velocity + span.begin, span.present, past.nesterov ? scale : __fmul_rn(scale, momentum),
             velocity);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                float& p = tile.value[group][k];
                const float sum = __fadd_rn(velocity.value[group][k], p);
                const float w = past.nesterov ? __fmul_rn(momentum, sum) : sum;
                p = past.nesterov ? __fadd_rn(w, p) : w;
                velocity.value[group][k] = __fmul_rn(w, inverse);
            }
        }
        store(team, velocity, past.fresh_velocity + span.begin, span.present);
    }
    if (past.residual != nullptr) {
        Tile residual;
        const float factor = __fmul_rn(scale, static_cast<float>(past.decay));
        load(team, past.residual + span.begin, span.present, factor, residual);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                tile.value[group][k] = __fadd_rn(tile.value[group][k], residual.value[group][k]);
            }
        }
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
    const Team team = form_team(TILE_NUMEL);
    const Span span(chunk_numel, numel, blockIdx.x);
    const Histogram histogram{Level(0), 0, block_bins};
    Tile tile;
    Values{values, dtype, numel, scale}.load_block(team, span.begin, span.present, tile);
    add_past(team, {residual, decay, velocity, fresh_velocity, momentum, nesterov, loss_scale}, span, tile);
    store(team, tile, p + span.begin, span.present);
    histogram.clear();
    __syncthreads();
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) histogram.count(tile.value[group][k]);
    }
    __syncthreads();
    histogram.add_to(bins + span.row * BINS);
}
