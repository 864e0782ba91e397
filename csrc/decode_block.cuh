// Decode one block of several rows and add it up, in row order: the bits of the sum are equal wherever it is computed.
#pragma once

#include "codecs.cuh"
#include "rows.cuh"

// Sum the team's block over `peers` rows, beginning with the row that the block is in.
template <typename Codec>
__device__ __forceinline__ void decode_block(const Team& team, const Rows& rows, long long peers, Tile& tile) {
    constexpr int BITS = Codec::BITS;
    Place<BITS> place(rows, team);
    for (long long peer = 0; peer < peers; ++peer) {
        const typename Codec::Levels levels = Codec::levels(*place.entry);
        unsigned int words[GROUPS];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const int element = team.element(group);
            words[group] = element < rows.block_numel ? read_codes<BITS>(place.codes, element) : 0;
        }
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                const float value = Codec::value(code_of<BITS>(words[group], k), levels);
                float& total = tile.value[group][k];
                total = peer == 0 ? value : __fadd_rn(total, value);
            }
        }
        place.advance(rows, 1);
    }
}

// Forget what lies past the first `present` elements.
__device__ __forceinline__ void cut(const Team& team, int present, Tile& tile) {
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            if (team.element(group) + k >= present) tile.value[group][k] = 0.0f;
        }
    }
}
