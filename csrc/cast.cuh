// SPDX-License-Identifier: Apache-2.0
// Stochastic rounding to bfloat16, and what it loses.
#pragma once

#include "encode_block.cuh"

constexpr int CAST_NUMEL = 8;   // per thread: 16 bytes of bfloat16, and the halves of four random words

template <typename T>
__device__ __forceinline__ void fetch_some(const T* first, int present, float (&value)[CAST_NUMEL]) {
    if (present == CAST_NUMEL && misalignment<WIDTH>(first) == 0) {
#pragma unroll
        for (int part = 0; part < CAST_NUMEL; part += WIDTH) {
            const auto some = *reinterpret_cast<const Vector<T, WIDTH>*>(first + part);
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) value[part + k] = to_float(some.lane[k]);
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < CAST_NUMEL; ++k) value[k] = k < present ? to_float(first[k]) : 0.0f;
}

template <typename T, int N>
__device__ __forceinline__ void store_some(const T (&value)[CAST_NUMEL], int present, T* first) {
    if (present == CAST_NUMEL && misalignment<N>(first) == 0) {
#pragma unroll
        for (int part = 0; part < CAST_NUMEL; part += N) {
            Vector<T, N> some;
#pragma unroll
            for (int k = 0; k < N; ++k) some.lane[k] = value[part + k];
            *reinterpret_cast<Vector<T, N>*>(first + part) = some;
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < CAST_NUMEL; ++k) {
        if (k < present) first[k] = value[k];
    }
}

// Away from zero with the probability of the fraction. Beyond the largest finite bfloat16, where chance could make
// infinity, and for infinity and NaN: to nearest.
__device__ __forceinline__ Bfloat16 round_by_chance(float value, unsigned int chance) {
    const unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F7F0000u) return from_float<Bfloat16>(value);
    return {static_cast<unsigned short>((bits + chance) >> 16)};
}

// p = values * scale + old * decay * loss_scale; fresh = (p - rounded p) / loss_scale. `place`, a multiple of 8, is the
// first value's among all elements that are rounded by this key.
extern "C" __global__ void cast_stochastic(const void* values, long long dtype, long long numel, double scale,
                                           Bfloat16* rounded, const float* old, float* fresh, const float* loss_scale,
                                           double decay, long long seed, long long step, long long stream,
                                           long long place) {
    const long long begin = (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * CAST_NUMEL;
    if (begin >= numel) return;
    const int present = static_cast<int>(min(numel - begin, static_cast<long long>(CAST_NUMEL)));
    float p[CAST_NUMEL];
    switch (dtype) {
        case FLOAT32: fetch_some(static_cast<const float*>(values) + begin, present, p); break;
        case FLOAT16: fetch_some(static_cast<const Half*>(values) + begin, present, p); break;
        default: fetch_some(static_cast<const Bfloat16*>(values) + begin, present, p);
    }
    const Carry carry{old, fresh, loss_scale, decay};
    float kept[CAST_NUMEL] = {};
    if (old != nullptr) fetch_some(old + begin, present, kept);
    unsigned int words[4];
    // Counters of eight elements, where others have four.
    philox({static_cast<unsigned long long>(seed), static_cast<unsigned int>(step), static_cast<unsigned int>(stream)},
           static_cast<unsigned long long>(place + begin) / 2, words);
    const float factor = old == nullptr ? 0.0f : carry.factor();
    const float inverse = loss_scale == nullptr ? 1.0f : __fdiv_rn(1.0f, *loss_scale);
    Bfloat16 result[CAST_NUMEL];
#pragma unroll
    for (int k = 0; k < CAST_NUMEL; ++k) {
        p[k] = __fmul_rn(p[k], static_cast<float>(scale));
        if (old != nullptr) p[k] = __fadd_rn(p[k], __fmul_rn(kept[k], factor));
        result[k] = round_by_chance(p[k], words[k / 2] >> k % 2 * 16 & 0xFFFFu);
        kept[k] = __fmul_rn(__fsub_rn(p[k], to_float(result[k])), inverse);
    }
    store_some<Bfloat16, CAST_NUMEL>(result, present, rounded + begin);
    if (fresh != nullptr) store_some<float, WIDTH>(kept, present, fresh + begin);
}
