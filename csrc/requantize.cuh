// SPDX-License-Identifier: Apache-2.0
// Encode the sum of several payload rows into one row. The sum never leaves the registers.
#pragma once

#include "decode_block.cuh"
#include "encode_block.cuh"

template <typename Codec, int MEMBERS, typename Rounding>
__device__ __forceinline__ void recode_by(const Rows& sources, long long peers, const Rows& target, long long numel,
                                          const Carry& carry, Rounding rounding) {
    const auto team = form_team<MEMBERS>(target.block_numel, target.blocks());
    if (!target.holds(team)) return;
    const int present = target.present(team, numel);
    Tile tile;
    decode_block<Codec>(team, sources, peers, tile);
    const Raw<float> old = fetch_old(team, carry, target.first_element(team), present);   // earlier: too many registers
    cut(team, present, tile);
    encode_block<Codec>(team, target, carry, rounding, present, old, tile);
}

template <typename Codec, typename Rounding>
__device__ __forceinline__ void recode(const Rows& sources, long long peers, const Rows& target, long long numel,
                                       const Carry& carry, Rounding rounding) {
    if (target.block_numel <= SHORT_NUMEL) return recode_by<Codec, FEW>(sources, peers, target, numel, carry, rounding);
    recode_by<Codec, LANES>(sources, peers, target, numel, carry, rounding);
}

// recode_CODEC: p = sum of the rows of `payloads` + old * decay * loss_scale, fresh = (p - decoded p) / loss_scale.

extern "C" __global__ void recode_uniform8(unsigned char* payloads, long long row_stride, long long peers,
                                           unsigned char* payload, long long row_blocks, long long block_numel,
                                           long long numel, const float* old, float* fresh, const float* loss_scale,
                                           double decay) {
    recode<Uniform<8>>({payloads, row_stride, 1, row_blocks, block_numel}, peers,
                       {payload, 0, 1, row_blocks, block_numel}, numel,
                       {old, fresh, loss_scale, decay}, Nearest{});
}

extern "C" __global__ void recode_uniform4(unsigned char* payloads, long long row_stride, long long peers,
                                           unsigned char* payload, long long row_blocks, long long block_numel,
                                           long long numel, const float* old, float* fresh, const float* loss_scale,
                                           double decay) {
    recode<Uniform<4>>({payloads, row_stride, 1, row_blocks, block_numel}, peers,
                       {payload, 0, 1, row_blocks, block_numel}, numel,
                       {old, fresh, loss_scale, decay}, Nearest{});
}

extern "C" __global__ void recode_uniform2(unsigned char* payloads, long long row_stride, long long peers,
                                           unsigned char* payload, long long row_blocks, long long block_numel,
                                           long long numel, const float* old, float* fresh, const float* loss_scale,
                                           double decay) {
    recode<Uniform<2>>({payloads, row_stride, 1, row_blocks, block_numel}, peers,
                       {payload, 0, 1, row_blocks, block_numel}, numel,
                       {old, fresh, loss_scale, decay}, Nearest{});
}

extern "C" __global__ void recode_companded4(unsigned char* payloads, long long row_stride, long long peers,
                                             unsigned char* payload, long long row_blocks, long long block_numel,
                                             long long numel, const float* old, float* fresh, const float* loss_scale,
                                             double decay) {
    recode<Companded>({payloads, row_stride, 1, row_blocks, block_numel}, peers,
                      {payload, 0, 1, row_blocks, block_numel}, numel,
                      {old, fresh, loss_scale, decay}, Nearest{});
}

extern "C" __global__ void recode_centroids2(unsigned char* payloads, long long row_stride, long long peers,
                                             unsigned char* payload, long long row_blocks, long long block_numel,
                                             long long numel, const float* old, float* fresh, const float* loss_scale,
                                             double decay) {
    recode<Centroids>({payloads, row_stride, 1, row_blocks, block_numel}, peers,
                      {payload, 0, 1, row_blocks, block_numel}, numel,
                      {old, fresh, loss_scale, decay}, Nearest{});
}

extern "C" __global__ void recode_sign_mean(unsigned char* payloads, long long row_stride, long long peers,
                                            unsigned char* payload, long long row_blocks, long long block_numel,
                                            long long numel, const float* old, float* fresh, const float* loss_scale,
                                            double decay) {
    recode<Sign<Mean>>({payloads, row_stride, 1, row_blocks, block_numel}, peers,
                       {payload, 0, 1, row_blocks, block_numel}, numel,
                       {old, fresh, loss_scale, decay}, Nearest{});
}

extern "C" __global__ void recode_sign_rms(unsigned char* payloads, long long row_stride, long long peers,
                                           unsigned char* payload, long long row_blocks, long long block_numel,
                                           long long numel, const float* old, float* fresh, const float* loss_scale,
                                           double decay) {
    recode<Sign<RootMeanSquare>>({payloads, row_stride, 1, row_blocks, block_numel}, peers,
                                 {payload, 0, 1, row_blocks, block_numel}, numel,
                                 {old, fresh, loss_scale, decay}, Nearest{});
}

extern "C" __global__ void recode_uniform8_stochastic(unsigned char* payloads, long long row_stride, long long peers,
                                                      unsigned char* payload, long long row_blocks,
                                                      long long block_numel, long long numel, const float* old,
                                                      float* fresh, const float* loss_scale, double decay,
                                                      long long seed, long long step, long long stream) {
    recode<Uniform<8>>({payloads, row_stride, 1, row_blocks, block_numel}, peers,
                       {payload, 0, 1, row_blocks, block_numel}, numel,
                       {old, fresh, loss_scale, decay}, Stochastic(seed, step, stream));
}

extern "C" __global__ void recode_uniform4_stochastic(unsigned char* payloads, long long row_stride, long long peers,
                                                      unsigned char* payload, long long row_blocks,
                                                      long long block_numel, long long numel, const float* old,
                                                      float* fresh, const float* loss_scale, double decay,
                                                      long long seed, long long step, long long stream) {
    recode<Uniform<4>>({payloads, row_stride, 1, row_blocks, block_numel}, peers,
                       {payload, 0, 1, row_blocks, block_numel}, numel,
                       {old, fresh, loss_scale, decay}, Stochastic(seed, step, stream));
}

extern "C" __global__ void recode_uniform2_stochastic(unsigned char* payloads, long long row_stride, long long peers,
                                                      unsigned char* payload, long long row_blocks,
                                                      long long block_numel, long long numel, const float* old,
                                                      float* fresh, const float* loss_scale, double decay,
                                                      long long seed, long long step, long long stream) {
    recode<Uniform<2>>({payloads, row_stride, 1, row_blocks, block_numel}, peers,
                       {payload, 0, 1, row_blocks, block_numel}, numel,
                       {old, fresh, loss_scale, decay}, Stochastic(seed, step, stream));
}
