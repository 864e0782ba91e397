// SPDX-License-Identifier: Apache-2.0
// Encode values into payload rows. Values and residuals are read and written once.
#pragma once

#include "encode_block.cuh"
#include "values.cuh"

template <typename Codec, int MEMBERS, typename Rounding>
__device__ __forceinline__ void encode_by(const Values& values, const Rows& rows, const Carry& carry,
                                          Rounding rounding) {
    const auto team = form_team<MEMBERS>(rows.block_numel, rows.blocks());
    if (!rows.holds(team)) return;
    const int present = rows.present(team, values.numel);
    const long long begin = rows.first_element(team);
    const Raw<float> old = fetch_old(team, carry, begin, present);   // under way when the values are waited for
    Tile tile;
    values.load_block(team, begin, present, tile);
    encode_block<Codec>(team, rows, carry, rounding, present, old, tile);
}

template <typename Codec, typename Rounding>
__device__ __forceinline__ void encode(const Values& values, const Rows& rows, const Carry& carry, Rounding rounding) {
    if (rows.block_numel <= SHORT_NUMEL) return encode_by<Codec, FEW>(values, rows, carry, rounding);
    encode_by<Codec, LANES>(values, rows, carry, rounding);
}

// encode_CODEC: p = values * scale + old * decay * loss_scale, fresh = (p - decoded p) / loss_scale.

extern "C" __global__ void encode_uniform8(const void* values, long long dtype, long long numel, double scale,
                                           unsigned char* payload, long long row_stride, long long rows,
                                           long long row_blocks, long long block_numel, const float* old, float* fresh,
                                           const float* loss_scale, double decay, const Part* parts,
                                           long long part_count) {
    encode<Uniform<8>>({values, dtype, numel, scale, {parts, part_count}},
                       {payload, row_stride, rows, row_blocks, block_numel}, {old, fresh, loss_scale, decay},
                       Nearest{});
}

extern "C" __global__ void encode_uniform4(const void* values, long long dtype, long long numel, double scale,
                                           unsigned char* payload, long long row_stride, long long rows,
                                           long long row_blocks, long long block_numel, const float* old, float* fresh,
                                           const float* loss_scale, double decay, const Part* parts,
                                           long long part_count) {
    encode<Uniform<4>>({values, dtype, numel, scale, {parts, part_count}},
                       {payload, row_stride, rows, row_blocks, block_numel}, {old, fresh, loss_scale, decay},
                       Nearest{});
}

extern "C" __global__ void encode_uniform2(const void* values, long long dtype, long long numel, double scale,
                                           unsigned char* payload, long long row_stride, long long rows,
                                           long long row_blocks, long long block_numel, const float* old, float* fresh,
                                           const float* loss_scale, double decay, const Part* parts,
                                           long long part_count) {
    encode<Uniform<2>>({values, dtype, numel, scale, {parts, part_count}},
                       {payload, row_stride, rows, row_blocks, block_numel}, {old, fresh, loss_scale, decay},
                       Nearest{});
}

extern "C" __global__ void encode_companded4(const void* values, long long dtype, long long numel, double scale,
                                             unsigned char* payload, long long row_stride, long long rows,
                                             long long row_blocks, long long block_numel, const float* old,
                                             float* fresh, const float* loss_scale, double decay, const Part* parts,
                                             long long part_count) {
    encode<Companded>({values, dtype, numel, scale, {parts, part_count}},
                      {payload, row_stride, rows, row_blocks, block_numel}, {old, fresh, loss_scale, decay},
                      Nearest{});
}

extern "C" __global__ void encode_centroids2(const void* values, long long dtype, long long numel, double scale,
                                             unsigned char* payload, long long row_stride, long long rows,
                                             long long row_blocks, long long block_numel, const float* old,
                                             float* fresh, const float* loss_scale, double decay, const Part* parts,
                                             long long part_count) {
    encode<Centroids>({values, dtype, numel, scale, {parts, part_count}},
                      {payload, row_stride, rows, row_blocks, block_numel}, {old, fresh, loss_scale, decay},
                      Nearest{});
}

extern "C" __global__ void encode_sign_mean(const void* values, long long dtype, long long numel, double scale,
                                            unsigned char* payload, long long row_stride, long long rows,
                                            long long row_blocks, long long block_numel, const float* old, float* fresh,
                                            const float* loss_scale, double decay, const Part* parts,
                                            long long part_count) {
    encode<Sign<Mean>>({values, dtype, numel, scale, {parts, part_count}},
                       {payload, row_stride, rows, row_blocks, block_numel}, {old, fresh, loss_scale, decay},
                       Nearest{});
}

extern "C" __global__ void encode_sign_rms(const void* values, long long dtype, long long numel, double scale,
                                           unsigned char* payload, long long row_stride, long long rows,
                                           long long row_blocks, long long block_numel, const float* old, float* fresh,
                                           const float* loss_scale, double decay, const Part* parts,
                                           long long part_count) {
    encode<Sign<RootMeanSquare>>({values, dtype, numel, scale, {parts, part_count}},
                                 {payload, row_stride, rows, row_blocks, block_numel}, {old, fresh, loss_scale, decay},
                                 Nearest{});
}

extern "C" __global__ void encode_uniform8_stochastic(const void* values, long long dtype, long long numel,
                                                      double scale, unsigned char* payload, long long row_stride,
                                                      long long rows, long long row_blocks, long long block_numel,
                                                      const float* old, float* fresh, const float* loss_scale,
                                                      double decay, long long seed, long long step, long long stream,
                                                      const Part* parts, long long part_count) {
    encode<Uniform<8>>({values, dtype, numel, scale, {parts, part_count}},
                       {payload, row_stride, rows, row_blocks, block_numel}, {old, fresh, loss_scale, decay},
                       Stochastic(seed, step, stream));
}

extern "C" __global__ void encode_uniform4_stochastic(const void* values, long long dtype, long long numel,
                                                      double scale, unsigned char* payload, long long row_stride,
                                                      long long rows, long long row_blocks, long long block_numel,
                                                      const float* old, float* fresh, const float* loss_scale,
                                                      double decay, long long seed, long long step, long long stream,
                                                      const Part* parts, long long part_count) {
    encode<Uniform<4>>({values, dtype, numel, scale, {parts, part_count}},
                       {payload, row_stride, rows, row_blocks, block_numel}, {old, fresh, loss_scale, decay},
                       Stochastic(seed, step, stream));
}

extern "C" __global__ void encode_uniform2_stochastic(const void* values, long long dtype, long long numel,
                                                      double scale, unsigned char* payload, long long row_stride,
                                                      long long rows, long long row_blocks, long long block_numel,
                                                      const float* old, float* fresh, const float* loss_scale,
                                                      double decay, long long seed, long long step, long long stream,
                                                      const Part* parts, long long part_count) {
    encode<Uniform<2>>({values, dtype, numel, scale, {parts, part_count}},
                       {payload, row_stride, rows, row_blocks, block_numel}, {old, fresh, loss_scale, decay},
                       Stochastic(seed, step, stream));
}
