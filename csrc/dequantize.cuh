// SPDX-License-Identifier: Apache-2.0
// Decode payload rows, or the sum of several, into values.
#pragma once

#include "decode_block.cuh"
#include "parts.cuh"

template <typename Codec, int MEMBERS>
__device__ __forceinline__ void decode_by(const Rows& rows, long long peers, void* values, long long dtype,
                                          long long numel, const Parts& parts) {
    const auto team = form_team<MEMBERS>(rows.block_numel, rows.blocks());
    if (!rows.holds(team)) return;
    Tile tile;
    decode_block<Codec>(team, rows, peers, tile);
    const long long begin = rows.first_element(team);
    const int present = rows.present(team, numel);
    switch (dtype) {
        case FLOAT32: return store(team, tile, static_cast<float*>(values), parts, begin, present);
        case FLOAT16: return store(team, tile, static_cast<Half*>(values), parts, begin, present);
        default: return store(team, tile, static_cast<Bfloat16*>(values), parts, begin, present);
    }
}

template <typename Codec>
__device__ __forceinline__ void decode(const Rows& rows, long long peers, void* values, long long dtype,
                                       long long numel, const Parts& parts) {
    if (rows.block_numel <= SHORT_NUMEL) return decode_by<Codec, FEW>(rows, peers, values, dtype, numel, parts);
    decode_by<Codec, LANES>(rows, peers, values, dtype, numel, parts);
}

// decode_CODEC: row r of the values is the sum of rows r to r + peers - 1 of the payload. So peers is 1 to decode every
// row, and rows is 1 to add up all of them.

extern "C" __global__ void decode_uniform8(unsigned char* payload, long long row_stride, long long rows,
                                           long long row_blocks, long long block_numel, long long peers, void* values,
                                           long long dtype, long long numel, const Part* parts, long long part_count) {
    decode<Uniform<8>>({payload, row_stride, rows, row_blocks, block_numel}, peers, values, dtype, numel,
                       {parts, part_count});
}

extern "C" __global__ void decode_uniform4(unsigned char* payload, long long row_stride, long long rows,
                                           long long row_blocks, long long block_numel, long long peers, void* values,
                                           long long dtype, long long numel, const Part* parts, long long part_count) {
    decode<Uniform<4>>({payload, row_stride, rows, row_blocks, block_numel}, peers, values, dtype, numel,
                       {parts, part_count});
}

extern "C" __global__ void decode_uniform2(unsigned char* payload, long long row_stride, long long rows,
                                           long long row_blocks, long long block_numel, long long peers, void* values,
                                           long long dtype, long long numel, const Part* parts, long long part_count) {
    decode<Uniform<2>>({payload, row_stride, rows, row_blocks, block_numel}, peers, values, dtype, numel,
                       {parts, part_count});
}

extern "C" __global__ void decode_companded4(unsigned char* payload, long long row_stride, long long rows,
                                             long long row_blocks, long long block_numel, long long peers, void* values,
                                             long long dtype, long long numel, const Part* parts,
                                             long long part_count) {
    decode<Companded>({payload, row_stride, rows, row_blocks, block_numel}, peers, values, dtype, numel,
                      {parts, part_count});
}

extern "C" __global__ void decode_centroids2(unsigned char* payload, long long row_stride, long long rows,
                                             long long row_blocks, long long block_numel, long long peers, void* values,
                                             long long dtype, long long numel, const Part* parts,
                                             long long part_count) {
    decode<Centroids>({payload, row_stride, rows, row_blocks, block_numel}, peers, values, dtype, numel,
                      {parts, part_count});
}

extern "C" __global__ void decode_sign(unsigned char* payload, long long row_stride, long long rows,
                                       long long row_blocks, long long block_numel, long long peers, void* values,
                                       long long dtype, long long numel, const Part* parts, long long part_count) {
    decode<Sign<Mean>>({payload, row_stride, rows, row_blocks, block_numel}, peers, values, dtype, numel,
                       {parts, part_count});
}
