// SPDX-License-Identifier: Apache-2.0
// Encode the tile that a team holds, and keep what the codes lose.
#pragma once

#include "codecs.cuh"
#include "rows.cuh"

// Residuals are kept unscaled, so that they survive a change of the loss scale.
struct Carry {
    const float* old;          // null: no residual
    float* fresh;
    const float* loss_scale;   // null: 1
    double decay;

    __device__ __forceinline__ float factor() const {
        const float factor = static_cast<float>(decay);
        return loss_scale == nullptr ? factor : __fmul_rn(factor, *loss_scale);
    }
};

template <int MEMBERS>
__device__ __forceinline__ Raw<float> fetch_old(const Team<MEMBERS>& team, const Carry& carry, long long begin,
                                                int present) {
    return carry.old == nullptr ? Raw<float>{} : fetch(team, carry.old + begin, present);
}

template <int MEMBERS>
__device__ __forceinline__ void add_old(const Team<MEMBERS>& team, const Carry& carry, const Raw<float>& old,
                                        int present, Tile& tile) {
    if (carry.old == nullptr) return;
    const float factor = carry.factor();
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            const float share = __fmul_rn(old.value(group, k), factor);
            tile.value[group][k] = __fadd_rn(tile.value[group][k], share);
        }
    }
    cut(team, present, tile);   // a factor that is not finite makes NaN of zeros
}

template <int MEMBERS>
__device__ __forceinline__ void keep_fresh(const Team<MEMBERS>& team, const Carry& carry, long long begin, int present,
                                           Tile& rest) {
    if (carry.fresh == nullptr) return;
    if (carry.loss_scale != nullptr) {
        const float inverse = __fdiv_rn(1.0f, *carry.loss_scale);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) rest.value[group][k] = __fmul_rn(rest.value[group][k], inverse);
        }
    }
    store(team, rest, carry.fresh + begin, present);
}

template <typename Codec, typename Rounding, int MEMBERS>
__device__ __forceinline__ void encode_block(const Team<MEMBERS>& team, const Rows& rows, const Carry& carry,
                                             Rounding rounding, int present, const Raw<float>& old, Tile& tile) {
    constexpr int BITS = Codec::BITS;
    const long long begin = rows.first_element(team);
    add_old(team, carry, old, present, tile);
    const Codec codec(team, tile, absmax(team, tile), rows.block_numel);
    const typename Codec::Levels levels = Codec::levels(codec.entry());
    const Place<BITS, MEMBERS> place(rows, team);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        rounding.move_to(begin + team.element(group));
        unsigned int codes = 0;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            float& value = tile.value[group][k];
            const unsigned int code = codec.code(value, rounding, k);
            codes |= code << k * BITS;
            value = __fsub_rn(value, __fadd_rn(Codec::START, Codec::value(code, 0, levels)));
        }
        place.write_codes(team, group, rows.holds(team, group), codes);
    }
    place.write_entry(team, codec.entry());
    keep_fresh(team, carry, begin, present, tile);
}
