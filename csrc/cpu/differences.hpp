// SPDX-License-Identifier: Apache-2.0
// Differences of 16-bit floats in few bits; the message is that of commopt/kernels/differences.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "codecs.hpp"

namespace COMMOPT_TARGET {

constexpr std::int64_t DIFFERENCE_HEAD = 16;  // bytes: twice their number, and 1 if they are packed; the length
constexpr std::int64_t OCTET = 8;             // numbers with a top of their own
constexpr std::int64_t MASKED = 64;           // numbers to a byte that tells which octets changed
constexpr std::int64_t SECTION = 1024;        // numbers to a highest top
constexpr int TOPS = 15;                      // that an octet can have, below the highest one

typedef std::uint16_t Shorts __attribute__((vector_size(32)));

constexpr std::int64_t AT_A_TIME = sizeof(Shorts) / 2;

inline std::int64_t parts_of(std::int64_t numel, std::int64_t unit) { return (numel + unit - 1) / unit; }

// Patterns of bits as integers in the order of the numbers, and back.
inline std::uint16_t ordered(std::uint16_t bits) {
    return static_cast<std::uint16_t>(bits ^ ((bits & 0x8000) != 0 ? 0x7fff : 0));
}

// A section of a message: what stands there, and how many bits each number of it takes.
struct Section {
    alignas(32) std::uint16_t base[SECTION];       // patterns of bits
    alignas(32) std::uint16_t places[SECTION];     // exponents of these
    alignas(32) std::uint16_t zigzag[SECTION];     // differences, the sign lowest
    alignas(32) std::uint16_t tops[SECTION / OCTET];  // place above the highest bit that changed; 0 for none
    alignas(32) std::uint16_t widths[SECTION];

    // mantissa: bits of it.
    void place(int mantissa) {
        const std::uint16_t exponents = static_cast<std::uint16_t>(0x7fff >> mantissa);
        for (std::int64_t at = 0; at < SECTION; ++at) {
            places[at] = static_cast<std::uint16_t>(base[at] >> mantissa & exponents);
        }
    }

    void size() {
        for (std::int64_t octet = 0; octet < SECTION / OCTET; ++octet) {
            const std::uint16_t top = tops[octet];
            for (std::int64_t at = octet * OCTET; at < (octet + 1) * OCTET; ++at) {
                const std::uint16_t width = static_cast<std::uint16_t>(top > places[at] ? top - places[at] : 0);
                widths[at] = std::min<std::uint16_t>(width, 16);
            }
        }
    }
};

inline std::uint16_t largest_of(const std::uint16_t* octet) {
#ifdef __AVX2__
    const __m128i all = _mm_load_si128(reinterpret_cast<const __m128i*>(octet));
    const __m128i turned = _mm_xor_si128(all, _mm_set1_epi16(-1));
    return static_cast<std::uint16_t>(~_mm_extract_epi16(_mm_minpos_epu16(turned), 0));
#else
    return *std::max_element(octet, octet + OCTET);
#endif
}

// Set differences and tops; return the highest top.
inline std::uint16_t differ(const std::uint16_t* values, Section& section) {
    alignas(32) std::uint16_t above[SECTION];
    for (std::int64_t at = 0; at < SECTION; ++at) {
        const std::uint16_t value = values[at], base = section.base[at];
        const std::uint16_t signs = static_cast<std::uint16_t>(static_cast<std::int16_t>(value) >> 15);
        const std::uint16_t base_signs = static_cast<std::uint16_t>(static_cast<std::int16_t>(base) >> 15);
        const std::uint16_t difference =
            static_cast<std::uint16_t>((value ^ (signs & 0x7fff)) - (base ^ (base_signs & 0x7fff)));
        const std::uint16_t sign = static_cast<std::uint16_t>(static_cast<std::int16_t>(difference) >> 15);
        section.zigzag[at] = static_cast<std::uint16_t>(difference << 1 ^ sign);
    }
    for (std::int64_t at = 0; at < SECTION; ++at) {
        const float value = static_cast<float>(static_cast<std::int32_t>(section.zigzag[at]));
        std::uint32_t bits;
        std::memcpy(&bits, &value, 4);
        const std::uint32_t top = (bits >> 23) - 126 + section.places[at];  // exponents of float32: 127 for 1
        above[at] = static_cast<std::uint16_t>(bits == 0 ? 0 : top);
    }
    std::uint16_t highest = 0;
    for (std::int64_t octet = 0; octet < SECTION / OCTET; ++octet) {
        section.tops[octet] = largest_of(above + octet * OCTET);
        highest = std::max(highest, section.tops[octet]);
    }
    return highest;
}

// Bits one after the other, the lowest first.
struct BitWriter {
    std::uint8_t* next;
    std::uint64_t pending = 0;
    int used = 0;  // bits of it, below 8

    void put(std::uint64_t bits, int width) {
        const std::uint64_t word = pending | bits << used;
        std::memcpy(next, &word, 8);
        const int ends = used + width;
        if (ends < 64) {
            next += ends >> 3;
            pending = word >> (ends & ~7);
        } else {
            next += 8;
            pending = used == 0 ? 0 : bits >> (64 - used);
        }
        used = ends & 7;
    }

    std::uint8_t* end() {
        if (used == 0) return next;
        *next = static_cast<std::uint8_t>(pending);
        return next + 1;
    }
};

// The bits of 4 numbers side by side, for each of 4 such; `widths` becomes theirs.
inline Longs joined(Shorts zigzag, Shorts sizes, Longs& widths) {
    const Words pairs = reinterpret_cast<Words>(zigzag), both = reinterpret_cast<Words>(sizes);
    const Words low = both & 0xffff;
    const Longs two = reinterpret_cast<Longs>((pairs & 0xffff) | (pairs >> 16) << low);
    const Longs all = reinterpret_cast<Longs>(low + (both >> 16));
    const Longs lower = all & 0xffffffff;
    widths = lower + (all >> 32);
    return (two & 0xffffffff) | (two >> 32) << lower;
}

// The other way round; above their widths `quads` may hold anything.
inline Shorts parted(Longs quads, Shorts sizes) {
    const Words both = reinterpret_cast<Words>(sizes), low = both & 0xffff, high = both >> 16;
    const Longs lower = reinterpret_cast<Longs>(low + high) & 0xffffffff;
    const Words pairs = reinterpret_cast<Words>((quads & 0xffffffff) | (quads >> lower) << 32);
    const Words one = Words{} + 1;
    return reinterpret_cast<Shorts>((pairs & ((one << low) - 1)) | ((pairs >> low) & ((one << high) - 1)) << 16);
}

inline Longs widths_of(Shorts sizes) {
    const Words both = reinterpret_cast<Words>(sizes);
    const Longs all = reinterpret_cast<Longs>((both & 0xffff) + (both >> 16));
    return (all & 0xffffffff) + (all >> 32);
}

inline void finish_difference(std::uint8_t* message, std::int64_t numel, bool packed, std::int64_t nbytes) {
    const std::int64_t content = 2 * numel + packed;
    std::memcpy(message, &content, 8);
    std::memcpy(message + 8, &nbytes, 8);
}

// Return the length of the message: of the differences, or of the numbers where that is shorter.
inline std::int64_t pack_difference(const std::uint16_t* values, const std::uint16_t* base, std::int64_t numel,
                                    std::int64_t mantissa, std::uint8_t* message) {
    const std::int64_t sections = parts_of(numel, SECTION), limit = DIFFERENCE_HEAD + 2 * numel;
    std::uint8_t* const highest = message + DIFFERENCE_HEAD;
    std::uint8_t* const masks = highest + 2 * sections;
    BitWriter writer{masks + parts_of(numel, MASKED)};
    std::vector<std::uint8_t> tops(static_cast<std::size_t>(parts_of(numel, MASKED) * (MASKED / OCTET) + 1));
    std::int64_t count = 0;  // of octets that changed
    Section section;
    alignas(32) std::uint16_t padded[SECTION];
    bool fits = true;
    for (std::int64_t number = 0; number < sections && fits; ++number) {
        const std::int64_t first = number * SECTION, there = std::min(numel - first, SECTION);
        const std::uint16_t* part = values + first;
        std::memcpy(section.base, base + first, 2 * there);
        if (there < SECTION) {
            std::fill(section.base + there, section.base + SECTION, 0);
            std::copy(part, part + there, padded);
            std::fill(padded + there, padded + SECTION, 0);
            part = padded;
        }
        section.place(static_cast<int>(mantissa));
        const std::uint16_t top = differ(part, section);
        std::memcpy(highest + 2 * number, &top, 2);
        const int lowest = std::max(top - TOPS, 0);
        for (std::int64_t mask = 0; mask < parts_of(there, MASKED); ++mask) {
            std::uint8_t changed = 0;
            for (int bit = 0; bit < MASKED / OCTET; ++bit) {
                std::uint16_t& own = section.tops[mask * (MASKED / OCTET) + bit];
                const bool is = own != 0;
                const int above = std::max(own - lowest, 1);
                changed = static_cast<std::uint8_t>(changed | is << bit);
                tops[static_cast<std::size_t>(count)] = static_cast<std::uint8_t>(above);
                count += is;
                own = static_cast<std::uint16_t>(is ? lowest + above : 0);
            }
            masks[first / MASKED + mask] = changed;
        }
        section.size();
        for (std::int64_t at = 0; at < there; at += AT_A_TIME) {
            if (at % MASKED == 0 && masks[(first + at) / MASKED] == 0) {
                at += MASKED - AT_A_TIME;
                continue;
            }
            Shorts zigzag, sizes;
            std::memcpy(&zigzag, section.zigzag + at, sizeof zigzag);
            std::memcpy(&sizes, section.widths + at, sizeof sizes);
            Longs widths;
            const Longs quads = joined(zigzag, sizes, widths);
            for (int quad = 0; quad < 4; ++quad) writer.put(quads[quad], static_cast<int>(widths[quad]));
        }
        fits = writer.next - message <= limit;
    }
    std::uint8_t* end = writer.end();
    const std::int64_t nbytes = end - message + (count + 1) / 2;
    if (!fits || nbytes > limit) {
        finish_difference(message, numel, false, limit);
        std::memcpy(message + DIFFERENCE_HEAD, values, 2 * numel);
        return limit;
    }
    tops[static_cast<std::size_t>(count)] = 0;
    for (const std::uint8_t* two = tops.data(); two < tops.data() + count; two += 2) {
        *end++ = static_cast<std::uint8_t>(two[0] | two[1] << 4);
    }
    finish_difference(message, numel, true, nbytes);
    return nbytes;
}

// The bits of 4 quads from the bit `begin` of `stream` on; whole bytes behind `stop` are not read.
inline Longs read_quads(const std::uint8_t* stream, const std::uint8_t* stop, std::int64_t begin, Longs widths) {
    Longs quads{};
    for (int quad = 0; quad < 4; ++quad) {
        const std::uint8_t* from = stream + (begin >> 3);
        const int used = begin & 7, width = static_cast<int>(widths[quad]);
        std::uint8_t last[9] = {};
        if (stop - from < 9) {
            std::copy(from, std::max(from, stop), last);
            from = last;
        }
        std::uint64_t word;
        std::memcpy(&word, from, 8);
        word >>= used;
        if (used + width > 64) word |= static_cast<std::uint64_t>(from[8]) << (64 - used);
        quads[quad] = word;
        begin += width;
    }
    return quads;
}

// Set `values`, which hold the base, to what was packed; return 0, or 1 for a message that pack_difference never makes.
inline std::int64_t unpack_difference(const std::uint8_t* message, std::int64_t nbytes, std::int64_t numel,
                                      std::int64_t mantissa, std::uint16_t* values) {
    std::int64_t content = 0, told = 0;
    if (nbytes < DIFFERENCE_HEAD) return 1;
    std::memcpy(&content, message, 8);
    std::memcpy(&told, message + 8, 8);
    if (told != nbytes || content >> 1 != numel) return 1;
    if ((content & 1) == 0) {
        if (nbytes != DIFFERENCE_HEAD + 2 * numel) return 1;
        std::memcpy(values, message + DIFFERENCE_HEAD, 2 * numel);
        return 0;
    }
    const std::int64_t sections = parts_of(numel, SECTION), masked = parts_of(numel, MASKED);
    if (nbytes < DIFFERENCE_HEAD + 2 * sections + masked) return 1;
    const std::uint8_t* const highest = message + DIFFERENCE_HEAD;
    const std::uint8_t* const masks = highest + 2 * sections;
    const std::uint8_t* const stream = masks + masked;
    std::int64_t count = 0, octet = 0, begin = 0;
    for (std::int64_t mask = 0; mask < masked; ++mask) count += __builtin_popcount(masks[mask]);
    const std::uint8_t* const tops = message + nbytes - (count + 1) / 2;
    if (tops < stream) return 1;
    Section section;
    for (std::int64_t number = 0; number < sections; ++number) {
        const std::int64_t first = number * SECTION, there = std::min(numel - first, SECTION);
        std::memcpy(section.base, values + first, 2 * there);
        std::fill(section.base + there, section.base + SECTION, 0);
        section.place(static_cast<int>(mantissa));
        std::uint16_t top;
        std::memcpy(&top, highest + 2 * number, 2);
        const int lowest = std::max(top - TOPS, 0);
        std::fill(section.tops, section.tops + SECTION / OCTET, 0);
        for (std::int64_t mask = 0; mask < parts_of(there, MASKED); ++mask) {
            for (unsigned changed = masks[first / MASKED + mask]; changed != 0; changed &= changed - 1, ++octet) {
                const int above = tops[octet / 2] >> 4 * (octet & 1) & 0xf;
                section.tops[mask * (MASKED / OCTET) + __builtin_ctz(changed)] =
                    static_cast<std::uint16_t>(lowest + above);
            }
        }
        section.size();
        bool changed = false;
        for (std::int64_t at = 0; at < there; at += AT_A_TIME) {
            if ((section.tops[at / OCTET] | section.tops[at / OCTET + 1]) == 0) continue;
            changed = true;
            Shorts sizes, base;
            std::memcpy(&sizes, section.widths + at, sizeof sizes);
            std::memcpy(&base, section.base + at, sizeof base);
            const Longs widths = widths_of(sizes);
            const Shorts zigzag = parted(read_quads(stream, tops, begin, widths), sizes);
            begin += static_cast<std::int64_t>(widths[0] + widths[1] + widths[2] + widths[3]);
            const Shorts sign = -(zigzag & 1), base_sign = reinterpret_cast<Shorts>(base > 0x7fff) & 0x7fff;
            const Shorts sum = (base ^ base_sign) + (zigzag >> 1 ^ sign);
            const Shorts result = sum ^ (reinterpret_cast<Shorts>(sum > 0x7fff) & 0x7fff);
            std::memcpy(section.base + at, &result, sizeof result);
        }
        if ((begin + 7) / 8 > tops - stream) return 1;
        if (changed) std::memcpy(values + first, section.base, 2 * there);
    }
    return (begin + 7) / 8 == tops - stream ? 0 : 1;
}

}  // namespace COMMOPT_TARGET
