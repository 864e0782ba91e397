// SPDX-License-Identifier: Apache-2.0
// How the values of a block become codes of BITS bits and one 4-byte entry, and back.
//
// A codec object is fitted to one block: entry() is what the row keeps of it and code() what a value becomes. levels()
// reads an entry and value() a code: static, for they are all that a receiver has. Every float32 operation is spelled
// out (the _rn intrinsics are never contracted), so that the bits do not depend on the compiler.
#pragma once

#include "philox.cuh"
#include "team.cuh"

// Below, a level / absmax could overflow: the block becomes zeros, and the residual keeps its values.
constexpr float TINY = 0x1p-100f;

__device__ __forceinline__ float magnitude(float value) {
    return __uint_as_float(__float_as_uint(value) & 0x7FFFFFFFu);
}

__device__ __forceinline__ unsigned int sign_bit(float value) { return __float_as_uint(value) >> 31; }

__device__ __forceinline__ float with_sign(float value, unsigned int negative) {
    return __uint_as_float(__float_as_uint(value) ^ negative << 31);
}

// absmax / `level`, the largest level, and the inverse of that; both are zero for a block of zeros.
__device__ __forceinline__ float scale_of(float absmax, float level) {
    return absmax < TINY ? 0.0f : __fdiv_rn(absmax, level);
}

__device__ __forceinline__ float inverse_of(float absmax, float level) {
    return absmax < TINY ? 0.0f : __fdiv_rn(level, absmax);
}

struct Nearest {
    __device__ __forceinline__ void move_to(long long) {}

    __device__ __forceinline__ int operator()(float quotient, int) const { return __float2int_rn(quotient); }
};

// Up with the probability of the fraction: right on average.
struct Stochastic {
    Dice dice;
    unsigned int words[WIDTH];

    __device__ __forceinline__ Stochastic(long long seed, long long step, long long stream)
        : dice{static_cast<unsigned long long>(seed), static_cast<unsigned int>(step),
               static_cast<unsigned int>(stream)} {}

    __device__ __forceinline__ void move_to(long long element) { philox(dice, element, words); }

    __device__ __forceinline__ int operator()(float quotient, int k) const {
        return __float2int_rd(__fadd_rn(quotient, unit_interval(words[k])));
    }
};

// Levels at equal distances, from -absmax to absmax.
template <int B>
struct Uniform {
    static constexpr int BITS = B;
    static constexpr int TOP = (1 << (B - 1)) - 1;
    using Levels = float;
    float scale;
    float inverse;

    __device__ __forceinline__ Uniform(const Team&, const Tile&, float absmax, long long)
        : scale(scale_of(absmax, TOP)), inverse(inverse_of(absmax, TOP)) {}

    __device__ __forceinline__ unsigned int entry() const { return __float_as_uint(scale); }

    template <typename Rounding>
    __device__ __forceinline__ unsigned int code(float value, const Rounding& rounding, int k) const {
        const int steps = rounding(__fmul_rn(value, inverse), k);
        return static_cast<unsigned int>(max(-TOP, min(steps, TOP)) + TOP + 1);
    }

    static __device__ __forceinline__ Levels levels(unsigned int entry) { return __uint_as_float(entry); }

    static __device__ __forceinline__ float value(unsigned int code, Levels scale) {
        return __fmul_rn(static_cast<float>(static_cast<int>(code) - TOP - 1), scale);
    }
};

// Sixteen levels +-(h + h * h / 2), h = 0.5 to 7.5, which lie denser near zero, as gradients do.
struct Companded {
    static constexpr int BITS = 4;
    static constexpr float TOP = 35.625f;
    using Levels = float;
    float scale;
    float inverse;

    __device__ __forceinline__ Companded(const Team&, const Tile&, float absmax, long long)
        : scale(scale_of(absmax, TOP)), inverse(inverse_of(absmax, TOP)) {}

    __device__ __forceinline__ unsigned int entry() const { return __float_as_uint(scale); }

    // The root inverts k -> the midpoint of levels k - 1 and k, so rounding it down finds the nearest level.
    template <typename Rounding>
    __device__ __forceinline__ unsigned int code(float value, const Rounding&, int) const {
        const float scaled = __fmul_rn(magnitude(value), inverse);
        const float root = __fsqrt_rn(__fadd_rn(2.0f * scaled, 0.75f));
        const int level = __float2int_rd(__fadd_rn(root, -1.0f));
        if (scale == 0.0f) return 0;
        return static_cast<unsigned int>(max(0, min(level, 7))) | sign_bit(value) << 3;
    }

    static __device__ __forceinline__ Levels levels(unsigned int entry) { return __uint_as_float(entry); }

    static __device__ __forceinline__ float value(unsigned int code, Levels scale) {
        const float h = static_cast<float>(code & 7u) + 0.5f;
        return with_sign(__fmul_rn(h + h * h * 0.5f, scale), code >> 3);   // the level is exact, contracted or not
    }
};

// Two magnitudes and a sign. All sums are of |value| / absmax, which cannot overflow.
struct Centroids {
    static constexpr int BITS = 2;
    struct Levels {
        float low;
        float high;
    };
    float inverse;
    float threshold;
    unsigned int packed;

    __device__ __forceinline__ Centroids(const Team& team, const Tile& tile, float absmax, long long block_numel)
        : inverse(inverse_of(absmax, 1.0f)) {
        float all = 0.0f;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                const float value = scaled(tile.value[group][k]);
                all = __fadd_rn(all, __fmul_rn(value, value));
            }
        }
        const float numel = static_cast<float>(block_numel);
        threshold = __fmul_rn(1.05f, __fsqrt_rn(__fdiv_rn(reduce<Sum>(team, all), numel)));
        float low = 0.0f;
        float high = 0.0f;
        float count = 0.0f;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                const float value = scaled(tile.value[group][k]);
                const bool is_high = value > threshold;
                low = __fadd_rn(low, is_high ? 0.0f : value);
                high = __fadd_rn(high, is_high ? value : 0.0f);
                count = __fadd_rn(count, is_high ? 1.0f : 0.0f);
            }
        }
        count = reduce<Sum>(team, count);
        low = mean(reduce<Sum>(team, low), numel - count, absmax);
        high = mean(reduce<Sum>(team, high), count, absmax);
        packed = from_float<Bfloat16>(low).bits | static_cast<unsigned int>(from_float<Bfloat16>(high).bits) << 16;
    }

    __device__ __forceinline__ float scaled(float value) const { return __fmul_rn(magnitude(value), inverse); }

    // The product makes both means NaN when absmax is not finite, that of an empty side too.
    static __device__ __forceinline__ float mean(float sum, float count, float absmax) {
        return __fmul_rn(count == 0.0f ? 0.0f : __fdiv_rn(sum, count), absmax);
    }

    __device__ __forceinline__ unsigned int entry() const { return packed; }

    template <typename Rounding>
    __device__ __forceinline__ unsigned int code(float value, const Rounding&, int) const {
        return (scaled(value) > threshold ? 1u : 0u) | sign_bit(value) << 1;
    }

    static __device__ __forceinline__ Levels levels(unsigned int entry) {
        return {__uint_as_float(entry << 16), __uint_as_float(entry & 0xFFFF0000u)};
    }

    // The sum turns -0 into +0, as any sum of a level and a zero does: the next encoding reads the sign of a zero.
    static __device__ __forceinline__ float value(unsigned int code, const Levels& levels) {
        return __fadd_rn(with_sign(code & 1u ? levels.high : levels.low, code >> 1), 0.0f);
    }
};

struct Mean {
    static __device__ __forceinline__ float term(float value) { return value; }
    static __device__ __forceinline__ float of(float mean) { return mean; }
};

struct RootMeanSquare {
    static __device__ __forceinline__ float term(float value) { return __fmul_rn(value, value); }
    static __device__ __forceinline__ float of(float mean) { return __fsqrt_rn(mean); }
};

// The sign, and one magnitude for the whole block. Sums are of |value| / absmax, which cannot overflow.
template <typename Measure>
struct Sign {
    static constexpr int BITS = 1;
    using Levels = float;
    float scale;

    __device__ __forceinline__ Sign(const Team& team, const Tile& tile, float absmax, long long block_numel) {
        const float inverse = inverse_of(absmax, 1.0f);
        float sum = 0.0f;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                sum = __fadd_rn(sum, Measure::term(__fmul_rn(magnitude(tile.value[group][k]), inverse)));
            }
        }
        const float mean = __fdiv_rn(reduce<Sum>(team, sum), static_cast<float>(block_numel));
        scale = __fmul_rn(Measure::of(mean), absmax);
    }

    __device__ __forceinline__ unsigned int entry() const { return __float_as_uint(scale); }

    template <typename Rounding>
    __device__ __forceinline__ unsigned int code(float value, const Rounding&, int) const {
        return sign_bit(value);
    }

    static __device__ __forceinline__ Levels levels(unsigned int entry) { return __uint_as_float(entry); }

    static __device__ __forceinline__ float value(unsigned int code, Levels scale) { return with_sign(scale, code); }
};
