// SPDX-License-Identifier: Apache-2.0
// How the values of a block become codes of BITS bits and one 4-byte entry, and back.
//
// A codec object is fitted to one block: entry() is what the row keeps of it and code() what a value becomes. levels()
// reads an entry and value() code k of several: static, for they are all that a receiver has. Sums of values begin with
// START: -0 leaves a first -0 as it is, +0 does not. Every float32 operation is spelled
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

// The value, negated if this bit of the codes is set.
__device__ __forceinline__ float with_sign(float value, unsigned int codes, int bit) {
    return __uint_as_float(__float_as_uint(value) ^ (codes << (31 - bit) & 0x80000000u));
}

// Four of the eight bytes of `low` and `high`, as the digits of `selector` say; 8 more is its sign, in all bits.
// (__byte_perm has no signs.)
__device__ __forceinline__ unsigned int permute(unsigned int low, unsigned int high, unsigned int selector) {
    unsigned int result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
    return result;
}

// The bits of code k that `mask` names, plus `offset`, exactly: as the last bits of a large power of two they are a
// number without a shift and without a conversion.
template <int BITS>
__device__ __forceinline__ float number(unsigned int codes, int k, unsigned int mask, float offset) {
    const int low = BITS == 8 ? 0 : k * BITS;
    const unsigned int power = static_cast<unsigned int>(127 + 23 - low) << 23;
    const unsigned int bits =
        BITS == 8 ? permute(codes, power, 0x7440u + k) : (codes & mask << low) | power;   // a byte takes a permutation
    return __fsub_rn(__uint_as_float(bits), __uint_as_float(power) - offset);
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
    static constexpr float START = -0.0f;
    using Levels = float;
    float scale;
    float inverse;

    template <int MEMBERS>
    __device__ __forceinline__ Uniform(const Team<MEMBERS>&, const Tile&, float absmax, long long)
        : scale(scale_of(absmax, TOP)), inverse(inverse_of(absmax, TOP)) {}

    __device__ __forceinline__ unsigned int entry() const { return __float_as_uint(scale); }

    template <typename Rounding>
    __device__ __forceinline__ unsigned int code(float value, const Rounding& rounding, int k) const {
        const int steps = rounding(__fmul_rn(value, inverse), k);
        return static_cast<unsigned int>(max(-TOP, min(steps, TOP)) + TOP + 1);
    }

    static __device__ __forceinline__ Levels levels(unsigned int entry) { return __uint_as_float(entry); }

    static __device__ __forceinline__ float value(unsigned int codes, int k, Levels scale) {
        return __fmul_rn(number<BITS>(codes, k, (1u << BITS) - 1, -TOP - 1), scale);
    }
};

// Sixteen levels +-(h + h * h / 2), h = 0.5 to 7.5, which lie denser near zero, as gradients do.
struct Companded {
    static constexpr int BITS = 4;
    static constexpr float TOP = 35.625f;
    static constexpr float START = -0.0f;
    using Levels = float;   // half of the scale
    float scale;
    float inverse;

    template <int MEMBERS>
    __device__ __forceinline__ Companded(const Team<MEMBERS>&, const Tile&, float absmax, long long)
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

    static __device__ __forceinline__ Levels levels(unsigned int entry) {
        return __fmul_rn(__uint_as_float(entry), 0.5f);   // exact, as no scale is that small
    }

    // Twice h + h * h / 2 is (h + 1)^2 - 1, which is exact.
    static __device__ __forceinline__ float value(unsigned int codes, int k, Levels half) {
        const float next = number<BITS>(codes, k, 7u, 1.5f);
        return with_sign(__fmul_rn(__fmaf_rn(next, next, -1.0f), half), codes, k * BITS + 3);
    }
};

// Two magnitudes and a sign. All sums are of |value| / absmax, which cannot overflow.
struct Centroids {
    static constexpr int BITS = 2;
    static constexpr float START = 0.0f;   // the next encoding reads the sign of a zero: it must not be that of a level
    struct Levels {
        unsigned int positive;   // low and high, as bfloat16
        unsigned int negative;   // both negated
    };
    float inverse;
    float threshold;
    unsigned int packed;

    template <int MEMBERS>
    __device__ __forceinline__ Centroids(const Team<MEMBERS>& team, const Tile& tile, float absmax,
                                         long long block_numel)
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
        return {entry, entry ^ 0x80008000u};
    }

    // A permutation of bytes looks it up. Its selector has a digit for each byte of the result: for the upper two,
    // where in the 8 bytes of the levels they are, and twice 9, which repeats the sign of `low`: 0.
    static __device__ __forceinline__ float value(unsigned int codes, int k, const Levels& levels) {
        const unsigned int selector = (codes & 3u << k * BITS) * (0x2200u >> k * BITS) + 0x1099u;
        return __uint_as_float(permute(levels.positive, levels.negative, selector));
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
    static constexpr float START = -0.0f;
    using Levels = float;
    float scale;

    template <int MEMBERS>
    __device__ __forceinline__ Sign(const Team<MEMBERS>& team, const Tile& tile, float absmax, long long block_numel) {
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

    static __device__ __forceinline__ float value(unsigned int codes, int k, Levels scale) {
        return with_sign(scale, codes, k);
    }
};
