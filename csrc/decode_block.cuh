// SPDX-License-Identifier: Apache-2.0
// Decode one block of several rows and add it up, in row order: the bits of the sum are equal wherever it is computed.
#pragma once

#include "codecs.cuh"
#include "rows.cuh"

constexpr int ROWS_AT_ONCE = 4;   // under way to a thread: those of a single row are too few bytes

// What a thread reads of one row.
template <typename Codec, int MEMBERS>
struct Encoded {
    unsigned int entry;
    unsigned int words[GROUPS];

    __device__ __forceinline__ void read(const Team<MEMBERS>& team, const Rows& rows,
                                         const Place<Codec::BITS, MEMBERS>& place) {
        entry = *place.entry;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            if (rows.holds(team, group)) words[group] = place.word(group);
        }
    }

    __device__ __forceinline__ void add_to(const Team<MEMBERS>& team, Tile& tile) const {
        const typename Codec::Levels levels = Codec::levels(entry);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const unsigned int codes = own_codes<Codec::BITS>(team, words[group]);
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                const float value = Codec::value(codes, k, levels);
                tile.value[group][k] = __fadd_rn(tile.value[group][k], value);
            }
        }
    }
};

// Sum the team's block over `peers` rows, beginning with the row that the block is in.
template <typename Codec, int MEMBERS>
__device__ __forceinline__ void decode_block(const Team<MEMBERS>& team, const Rows& rows, long long peers, Tile& tile) {
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) tile.value[group][k] = Codec::START;
    }
    Place<Codec::BITS, MEMBERS> place(rows, team);
    Encoded<Codec, MEMBERS> batch[ROWS_AT_ONCE] = {};   // groups that the block does not have stay 0
    for (int left = static_cast<int>(peers); left > 0; left -= ROWS_AT_ONCE) {
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; ++i) {
            if (i >= left) continue;
            batch[i].read(team, rows, place);
            place.advance(rows, 1);
        }
#pragma unroll
        for (int i = 0; i < ROWS_AT_ONCE; ++i) {
            if (i < left) batch[i].add_to(team, tile);
        }
    }
}
