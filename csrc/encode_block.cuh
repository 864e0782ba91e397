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

__device__ __forceinline__ void add_old(const Team& team, const Carry& carry, long long begin, int present,
                                        Tile& tile) {
    if (carry.old == nullptr) return;
    Tile old;
    load(team, carry.old + begin, present, carry.factor(), old);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) tile.value[group][k] = __fadd_rn(tile.value[group][k], old.value[group][k]);
    }
}

__device__ __forceinline__ void keep_fresh(const Team& team, const Carry& carry, long long begin, int present,
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

template <typename Codec, typename Rounding>
__device__ __forceinline__ void encode_block(const Team& team, const Rows& rows, const Carry& carry, Rounding rounding,
                                             int present, Tile& tile) {
    constexpr int BITS = Codec::BITS;
    const long long begin = rows.first_element(team);
    add_old(team, carry, begin, present, tile);
    const Codec codec(team, tile, absmax(team, tile), rows.block_numel);
    const typename Codec::Levels levels = Codec::levels(codec.entry());
    const Place<BITS> place(rows, team);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const int element = team.element(group);
        rounding.move_to(begin + element);
        unsigned int word = 0;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            float& value = tile.value[group][k];
            const unsigned int code = codec.code(value, rounding, k);
            word |= code << k * BITS;
            value = __fsub_rn(value, Codec::value(code, levels));
        }
        write_codes<BITS>(place.codes, element, element < rows.block_numel, word);
    }
    place.write_entry(team, codec.entry());
    keep_fresh(team, carry, begin, present, tile);
}
