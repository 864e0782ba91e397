// SPDX-License-Identifier: Apache-2.0
// How the elements of a block become codes, and codes values again: the formulas of ../codecs.cuh, eight at a time.
// Sums over a block are of |value| / absmax, which cannot overflow, and in one order on every processor.
#pragma once

#include <cstdint>
#include <cstring>

#include "vectors.hpp"

namespace COMMOPT_TARGET {

typedef std::int32_t Ints __attribute__((vector_size(32)));
typedef std::uint32_t Words __attribute__((vector_size(32)));

typedef std::uint64_t Longs __attribute__((vector_size(32)));

constexpr Ints SIGN = Ints{} + INT32_MIN;
constexpr float TINY = 0x1p-100f;          // a block whose absmax is below is encoded as zeros
constexpr std::int64_t MOST_BLOCK = 4096;  // elements
constexpr std::int64_t SUMMED = 4 * LANES;  // elements that go into as many sums, side by side

template <typename To, typename From>
inline To as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Of the lower halves.
inline Longs product(Longs v, std::uint32_t by) {
#ifdef __AVX2__
    const __m256i factor = _mm256_set1_epi64x(by);
    return reinterpret_cast<Longs>(_mm256_mul_epu32(reinterpret_cast<__m256i>(v), factor));
#else
    return (v & 0xFFFFFFFFull) * static_cast<std::uint64_t>(by);
#endif
}

inline Floats magnitude(Floats v) { return as<Floats>(as<Ints>(v) & ~SIGN); }

inline Floats either(Ints mask, Floats yes, Floats no) {
    return as<Floats>((mask & as<Ints>(yes)) | (~mask & as<Ints>(no)));
}

// The element of `table` that the lowest three bits of each code name.
inline Floats looked_up(Floats table, Ints codes) {
#ifdef __AVX2__
    return reinterpret_cast<Floats>(
        _mm256_permutevar8x32_ps(reinterpret_cast<__m256>(table), reinterpret_cast<__m256i>(codes)));
#else
    Floats found;
    for (int lane = 0; lane < LANES; ++lane) found[lane] = table[codes[lane] & 7];
    return found;
#endif
}

inline Floats with_sign(Floats v, Ints negative) { return as<Floats>(as<Ints>(v) ^ (negative << 31)); }

inline Ints larger(Ints one, Ints other) { return one > other ? one : other; }

// The largest of eight |value|, as integers; NaN when there is one, since as integers those are the largest.
inline float largest(Ints most) {
    for (int distance = 4; distance > 0; distance /= 2) {
        most = larger(most, __builtin_shuffle(most, Ints{0, 1, 2, 3, 4, 5, 6, 7} ^ distance));
    }
    return as<float>(most[0]);
}

inline float scale_of(float absmax, float top) { return absmax < TINY ? 0.0f : absmax / top; }
inline float inverse_of(float absmax, float top) { return absmax < TINY ? 0.0f : top / absmax; }

// The sum of `term(value)` over a block.
template <typename Term>
inline float sum_of(const float* p, std::int64_t numel, const Term& term) {
    Floats sums[4] = {};
    for (std::int64_t at = 0; at < numel; at += SUMMED) {
        for (int k = 0; k < 4; ++k) sums[k] += term(load(p + at + k * LANES));
    }
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// A whole number, as a float32 near `MAGIC` holds it in its last bits, rounded to nearest even.
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23

struct Nearest {
    Ints operator()(Floats quotient, std::int64_t) const { return as<Ints>(quotient + MAGIC) - as<std::int32_t>(MAGIC); }
};

// Up with the probability of the fraction: right on average.
struct Stochastic {
    const float* chances;  // of the block's elements, in [0, 1)

    Ints operator()(Floats quotient, std::int64_t at) const {
        const Floats moved = quotient + load(chances + at);
        const Ints cut = __builtin_convertvector(moved, Ints);
        return cut + (__builtin_convertvector(cut, Floats) > moved);  // a comparison that holds is -1
    }
};

// Levels at equal distances, from -absmax to absmax.
template <int B>
struct Uniform {
    static constexpr int BITS = B;
    static constexpr std::int32_t TOP = (1 << (B - 1)) - 1;
    static constexpr std::uint8_t ZEROS = B == 8 ? 0x80 : B == 4 ? 0x88 : 0xAA;
    float scale = 0.0f, inverse = 0.0f;

    Uniform() = default;
    Uniform(const float*, std::int64_t, float absmax) : scale(scale_of(absmax, TOP)), inverse(inverse_of(absmax, TOP)) {}
    explicit Uniform(std::uint32_t entry) : scale(as<float>(entry)), inverse(0.0f) {}

    std::uint32_t entry() const { return as<std::uint32_t>(scale); }

    template <typename Rounding>
    Ints code(Floats value, const Rounding& rounding, std::int64_t at) const {
        Ints steps = rounding(value * inverse, at);
        steps = steps > TOP ? Ints{} + TOP : steps;
        steps = steps < -TOP ? Ints{} - TOP : steps;
        return steps + TOP + 1;
    }

    Floats value(Ints code) const {
        if constexpr (B < 8) code &= 2 * TOP + 1;
        return __builtin_convertvector(code - (TOP + 1), Floats) * scale;
    }
};

inline Floats square_root(Floats v) {
#ifdef __AVX__
    return reinterpret_cast<Floats>(_mm256_sqrt_ps(reinterpret_cast<__m256>(v)));
#else
    for (int lane = 0; lane < LANES; ++lane) v[lane] = __builtin_sqrtf(v[lane]);
    return v;
#endif
}

// Sixteen levels +-(h + h * h / 2), h = 0.5 to 7.5, which lie denser near zero, as gradients do.
struct Companded {
    static constexpr int BITS = 4;
    static constexpr float TOP = 35.625f;
    static constexpr std::uint8_t ZEROS = 0;
    static constexpr Floats LEVELS = {0.625f, 2.625f, 5.625f, 9.625f, 14.625f, 20.625f, 27.625f, TOP};
    float scale = 0.0f, inverse = 0.0f;
    Floats levels = {};

    Companded() = default;
    Companded(const float*, std::int64_t, float absmax) : scale(scale_of(absmax, TOP)), inverse(inverse_of(absmax, TOP)) {}
    explicit Companded(std::uint32_t entry) : scale(as<float>(entry)), levels(LEVELS * scale) {}

    std::uint32_t entry() const { return as<std::uint32_t>(scale); }

    // The root inverts k -> the midpoint of levels k - 1 and k, so rounding it down finds the nearest level.
    template <typename Rounding>
    Ints code(Floats value, const Rounding&, std::int64_t) const {
        const Floats scaled = magnitude(value) * inverse;
        Ints level = __builtin_convertvector(square_root(scaled * 2.0f + 0.75f) - 1.0f, Ints);
        level = level > 7 ? Ints{} + 7 : level;
        level = level < 0 ? Ints{} : level;
        const Ints signs = as<Ints>(as<Words>(value) >> 31) << 3;
        return scale == 0.0f ? Ints{} : level | signs;
    }

    Floats value(Ints code) const { return with_sign(looked_up(levels, code), code >> 3); }
};

// Two magnitudes, bfloat16, and a sign.
struct Centroids {
    static constexpr int BITS = 2;
    static constexpr std::uint8_t ZEROS = 0;
    float inverse = 0.0f, threshold = 0.0f, low = 0.0f, high = 0.0f;
    Floats levels = {};

    Centroids() = default;
    Centroids(const float* p, std::int64_t numel, float absmax) : inverse(inverse_of(absmax, 1.0f)) {
        const float by = inverse;
        const float squares = sum_of(p, numel, [&](Floats v) {
            const Floats scaled = magnitude(v) * by;
            return scaled * scaled;
        });
        threshold = 1.05f * __builtin_sqrtf(squares / static_cast<float>(numel));
        const float above = threshold;
        Floats lows[4] = {}, highs[4] = {};
        Ints counts = {};
        for (std::int64_t at = 0; at < numel; at += SUMMED) {
            for (int k = 0; k < 4; ++k) {
                const Floats scaled = magnitude(load(p + at + k * LANES)) * by;
                const Ints is_high = scaled > above;
                lows[k] += either(is_high, Floats{}, scaled);
                highs[k] += either(is_high, scaled, Floats{});
                counts -= is_high;  // which is -1
            }
        }
        const float count = sum(__builtin_convertvector(counts, Floats));
        low = mean(sum((lows[0] + lows[1]) + (lows[2] + lows[3])), static_cast<float>(numel) - count, absmax);
        high = mean(sum((highs[0] + highs[1]) + (highs[2] + highs[3])), count, absmax);
    }
    // The sums turn -0 into +0, as any sum of a level and a zero does: the next encoding reads the sign of a zero.
    explicit Centroids(std::uint32_t entry) : low(as<float>(entry << 16)), high(as<float>(entry & 0xFFFF0000u)) {
        levels = Floats{low, high, -low, -high, low, high, -low, -high} + 0.0f;
    }

    // The product makes both means NaN when absmax is not finite, that of an empty side too.
    static float mean(float sum, float count, float absmax) {
        return rounded((count == 0.0f ? 0.0f : sum / count) * (absmax < TINY ? 0.0f : absmax));
    }

    // To the nearest bfloat16.
    static float rounded(float value) {
        const std::uint32_t bits = as<std::uint32_t>(value);
        if (value != value) return as<float>(bits | 0x400000u);
        return as<float>((bits + 0x7FFFu + (bits >> 16 & 1)) & 0xFFFF0000u);
    }

    std::uint32_t entry() const { return as<std::uint32_t>(low) >> 16 | (as<std::uint32_t>(high) & 0xFFFF0000u); }

    template <typename Rounding>
    Ints code(Floats value, const Rounding&, std::int64_t) const {
        const Ints is_high = magnitude(value) * inverse > threshold;
        return (is_high & 1) | as<Ints>(as<Words>(value) >> 31) << 1;
    }

    Floats value(Ints code) const { return looked_up(levels, code); }
};

struct Mean {
    static Floats term(Floats v) { return v; }
    static float of(float mean) { return mean; }
};

struct RootMeanSquare {
    static Floats term(Floats v) { return v * v; }
    static float of(float mean) { return __builtin_sqrtf(mean); }
};

// The sign, and one magnitude for the whole block.
template <typename Measure>
struct Sign {
    static constexpr int BITS = 1;
    static constexpr std::uint8_t ZEROS = 0;
    float scale = 0.0f;

    Sign() = default;
    Sign(const float* p, std::int64_t numel, float absmax) {
        const float by = inverse_of(absmax, 1.0f);
        const float total = sum_of(p, numel, [&](Floats v) { return Measure::term(magnitude(v) * by); });
        scale = Measure::of(total / static_cast<float>(numel)) * (absmax < TINY ? 0.0f : absmax);
    }
    explicit Sign(std::uint32_t entry) : scale(as<float>(entry)) {}

    std::uint32_t entry() const { return as<std::uint32_t>(scale); }

    template <typename Rounding>
    Ints code(Floats value, const Rounding&, std::int64_t) const {
        return as<Ints>(as<Words>(value) >> 31);
    }

    Floats value(Ints code) const { return with_sign(all(scale), code); }
};

// ------------------------------------------------------------------------------------------ codes in memory

// A bit of eight codes, the first code's lowest.
template <int BIT>
inline std::uint32_t bits_of(Ints codes) {
#ifdef __AVX2__
    return static_cast<std::uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(codes << (31 - BIT))));
#else
    std::uint32_t bits = 0;
    for (int lane = 0; lane < LANES; ++lane) bits |= (codes[lane] >> BIT & 1u) << lane;
    return bits;
#endif
}

#ifdef __AVX2__
// The lowest bytes of 32 codes, in their order.
inline __m256i bytes_of(const Ints* codes) {
    const auto words = [&](int at) {
        return _mm256_packus_epi32(reinterpret_cast<__m256i>(codes[at]), reinterpret_cast<__m256i>(codes[at + 1]));
    };
    const __m256i halves = _mm256_packus_epi16(words(0), words(2));
    return _mm256_permutevar8x32_epi32(halves, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
#endif

// Write SUMMED codes of B bits, the first in the lowest bits.
template <int B>
inline void write_codes(std::uint8_t* to, const Ints* codes) {
    if constexpr (B == 1) {
        std::uint32_t packed = 0;
        for (int k = 0; k < 4; ++k) packed |= bits_of<0>(codes[k]) << LANES * k;
        std::memcpy(to, &packed, sizeof packed);  // of a little-endian machine
        return;
    }
#ifdef __AVX2__
    __m256i packed = bytes_of(codes);
    if constexpr (B == 8) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), packed);
    if constexpr (B == 4) {
        packed = _mm256_maddubs_epi16(packed, _mm256_set1_epi16(0x1001));
        packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(packed, packed), 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
    }
    if constexpr (B == 2) {
        packed = _mm256_madd_epi16(_mm256_maddubs_epi16(packed, _mm256_set1_epi16(0x0401)), _mm256_set1_epi32(0x00100001));
        packed = _mm256_shuffle_epi8(packed, _mm256_set1_epi32(0x0C080400));
        const __m128i halves = _mm_unpacklo_epi32(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), halves);
    }
#else
    for (int k = 0; k < 4; ++k) {
        std::uint64_t packed = 0;
        for (int lane = 0; lane < LANES; ++lane) packed |= static_cast<std::uint64_t>(codes[k][lane]) << B * lane;
        std::memcpy(to + B * k, &packed, B);
    }
#endif
}

// Read eight codes. Bits of the next ones may be above those of B < 8 bits.
template <int B>
inline Ints read_codes(const std::uint8_t* from) {
    if constexpr (B == 8) {
#ifdef __AVX2__
        return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
        Ints codes;
        for (int lane = 0; lane < LANES; ++lane) codes[lane] = from[lane];
        return codes;
#endif
    } else {
        constexpr Words PLACES = {0, B, 2 * B, 3 * B, 4 * B, 5 * B, 6 * B, 7 * B};
        std::uint32_t packed = 0;
        std::memcpy(&packed, from, B);
        return as<Ints>((Words{} + packed) >> PLACES);
    }
}

}  // namespace COMMOPT_TARGET
