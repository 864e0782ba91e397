// SPDX-License-Identifier: Apache-2.0
// Exponents of bfloat16 in fewer bits; the message is that of commopt/kernels/packing.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "vectors.hpp"

namespace COMMOPT_TARGET {

constexpr std::int64_t BLOCK = 256;
constexpr std::int64_t LISTED = 12;  // places of the list, for each block
constexpr std::int64_t HEAD = 16;    // bytes, of which the first is not 0 where all exponents travel as they are
constexpr int ELSEWHERE = 7;
constexpr int PLANES = 3;
constexpr std::int64_t WORDS = BLOCK / 32;  // of a block in a plane

inline std::int64_t blocks_of(std::int64_t numel) { return (numel + BLOCK - 1) / BLOCK; }

// The parts of a message of so many blocks; all exponents would begin where planes do. What does not fit goes on
// in `spare` bytes beyond it.
template <typename Byte>
struct Message {
    Byte *head, *lows, *planes[PLANES], *largest, *listed, *end;
    std::int64_t spare;

    Message(Byte* packed, std::int64_t blocks) {
        const std::int64_t plane = blocks * BLOCK / 8;
        const std::int64_t nbytes = (HEAD + blocks * (BLOCK + 1 + LISTED) + PLANES * plane + 15) / 16 * 16;
        head = packed;
        lows = head + HEAD;
        planes[0] = lows + blocks * BLOCK;
        planes[1] = planes[0] + plane;
        planes[2] = planes[1] + plane;
        largest = planes[2] + plane;
        listed = largest + blocks;
        end = packed + nbytes;
        spare = HEAD + 2 * blocks * BLOCK - nbytes;
    }
};

// Bytes one after the other, to the end of a message and then beyond it.
template <typename Byte>
struct Stream {
    Byte *next, *stop, *beyond, *beyond_stop;

    Byte* take() {  // null after the last one
        if (next == stop) {
            if (stop == beyond_stop) return nullptr;
            next = beyond;
            stop = beyond_stop;
            if (next == stop) return nullptr;
        }
        return next++;
    }
};

#ifdef __AVX2__

// The first of each eight bytes last: in a byte of a plane the first one's bit is the highest.
inline __m256i turned(__m256i bytes) {
    return _mm256_shuffle_epi8(bytes, _mm256_setr_epi64x(0x0001020304050607, 0x08090a0b0c0d0e0f, 0x0001020304050607,
                                                         0x08090a0b0c0d0e0f));
}

// Set the planes of 32 places; return whose bits are all set, the first one's lowest.
inline std::uint32_t to_planes(const std::uint8_t* places, std::uint32_t* planes) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(places));
    const __m256i elsewhere = _mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(ELSEWHERE));
    __m256i bits = _mm256_slli_epi16(turned(bytes), 8 - PLANES);
    for (int plane = PLANES; plane-- > 0; bits = _mm256_slli_epi16(bits, 1)) planes[plane] = _mm256_movemask_epi8(bits);
    return _mm256_movemask_epi8(elsewhere);
}

// The other way round; adds `base` to the places, or to 0 where all bits are set.
inline std::uint32_t from_planes(const std::uint32_t* planes, std::uint8_t base, std::uint8_t* exponents) {
    const __m256i own_byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i own_bit = _mm256_set1_epi64x(0x0102040810204080);
    __m256i places = _mm256_setzero_si256();
    for (int plane = 0; plane < PLANES; ++plane) {
        const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(planes[plane]), own_byte);
        const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, own_bit), own_bit);
        places = _mm256_or_si256(places, _mm256_and_si256(set, _mm256_set1_epi8(1 << plane)));
    }
    const __m256i elsewhere = _mm256_cmpeq_epi8(places, _mm256_set1_epi8(ELSEWHERE));
    const __m256i sums = _mm256_add_epi8(_mm256_andnot_si256(elsewhere, places), _mm256_set1_epi8(base));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(exponents), sums);
    return _mm256_movemask_epi8(elsewhere);
}

#else

constexpr std::uint64_t LOWEST = 0x0101010101010101;  // bit of eight bytes

// The lowest bits of eight bytes, that of the first one lowest.
inline std::uint32_t lowest_bits(std::uint64_t bytes) { return (bytes & LOWEST) * 0x0102040810204080 >> 56; }

inline std::uint32_t to_planes(const std::uint8_t* places, std::uint32_t* planes) {
    std::uint32_t elsewhere = 0;
    std::fill(planes, planes + PLANES, 0);
    for (int byte = 0; byte < 4; ++byte) {
        std::uint64_t eight;
        std::memcpy(&eight, places + 8 * byte, 8);
        for (int plane = 0; plane < PLANES; ++plane) {  // that of the first one highest
            const std::uint64_t bits = ((eight >> plane) & LOWEST) * 0x8040201008040201 >> 56;
            planes[plane] |= static_cast<std::uint32_t>(bits << 8 * byte);
        }
        elsewhere |= lowest_bits(eight & (eight >> 1) & (eight >> 2)) << 8 * byte;
    }
    return elsewhere;
}

inline std::uint32_t from_planes(const std::uint32_t* planes, std::uint8_t base, std::uint8_t* exponents) {
    std::uint32_t elsewhere = 0;
    for (int byte = 0; byte < 4; ++byte) {
        std::uint64_t eight = 0;
        for (int plane = 0; plane < PLANES; ++plane) {
            const std::uint64_t bits = (planes[plane] >> 8 * byte & 0xff) * LOWEST & 0x0102040810204080;
            eight |= ((bits + 0x7f7f7f7f7f7f7f7f) >> 7 & LOWEST) << plane;
        }
        const std::uint64_t found = eight & (eight >> 1) & (eight >> 2) & LOWEST;
        elsewhere |= lowest_bits(found) << 8 * byte;
        eight = (eight & ~(found * ELSEWHERE)) + base * LOWEST;  // no byte exceeds its largest exponent
        std::memcpy(exponents + 8 * byte, &eight, 8);
    }
    return elsewhere;
}

#endif

inline int base_of(std::uint8_t largest) { return std::max<int>(largest, ELSEWHERE - 1) - (ELSEWHERE - 1); }

inline std::uint8_t low_of(std::uint16_t bits) { return static_cast<std::uint8_t>((bits >> 8 & 0x80) | (bits & 0x7f)); }

// All exponents as they are.
inline std::int64_t pack_as_it_is(const std::uint16_t* values, std::int64_t numel, std::uint8_t* packed,
                                  std::uint8_t* beyond) {
    const std::int64_t blocks = blocks_of(numel);
    const Message<std::uint8_t> message(packed, blocks);
    Stream<std::uint8_t> exponents{message.planes[0], message.end, beyond, beyond + message.spare};
    message.head[0] = 1;
    for (std::int64_t at = 0; at < blocks * BLOCK; ++at) {
        const std::uint16_t bits = values[std::min(at, numel - 1)];
        message.lows[at] = low_of(bits);
        *exponents.take() = static_cast<std::uint8_t>(bits >> 7);
    }
    return message.spare;
}

// Return how many bytes stand beyond the message.
inline std::int64_t pack(const std::uint16_t* values, std::int64_t numel, std::uint8_t* packed, std::uint8_t* beyond) {
    const std::int64_t blocks = blocks_of(numel);
    const Message<std::uint8_t> message(packed, blocks);
    Stream<std::uint8_t> listed{message.listed, message.end, beyond, beyond + message.spare};
    std::fill(message.head, message.lows, 0);
    std::uint16_t padded[BLOCK];
    std::uint8_t exponents[BLOCK], places[BLOCK];
    for (std::int64_t block = 0; block < blocks; ++block) {
        const std::uint16_t* part = values + block * BLOCK;
        if (numel - block * BLOCK < BLOCK) {
            const std::int64_t there = numel - block * BLOCK;
            std::copy(part, part + there, padded);
            std::fill(padded + there, padded + BLOCK, padded[there - 1]);
            part = padded;
        }
        std::uint8_t* lows = message.lows + block * BLOCK;
        std::uint8_t largest = 0;
        for (int at = 0; at < BLOCK; ++at) {
            lows[at] = low_of(part[at]);
            exponents[at] = static_cast<std::uint8_t>(part[at] >> 7);
        }
        for (int at = 0; at < BLOCK; ++at) largest = std::max(largest, exponents[at]);
        message.largest[block] = largest;
        const std::uint8_t base = static_cast<std::uint8_t>(base_of(largest));
        for (int at = 0; at < BLOCK; ++at) {
            const std::uint8_t place = static_cast<std::uint8_t>(exponents[at] - base);
            places[at] = std::min<std::uint8_t>(place, ELSEWHERE);
        }
        for (int word = 0; word < WORDS; ++word) {
            std::uint32_t planes[PLANES];
            std::uint32_t found = to_planes(places + 32 * word, planes);
            for (int plane = 0; plane < PLANES; ++plane) {
                std::memcpy(message.planes[plane] + 4 * (block * WORDS + word), planes + plane, 4);
            }
            for (; found != 0; found &= found - 1) {
                std::uint8_t* const next = listed.take();
                if (next == nullptr) return pack_as_it_is(values, numel, packed, beyond);
                *next = exponents[32 * word + __builtin_ctz(found)];
            }
        }
    }
    if (listed.stop != message.end) return listed.next - beyond;
    std::fill(listed.next, listed.stop, 0);
    return 0;
}

// beyond_nbytes: that were received, 0 where all stood in the message.
inline void unpack(const std::uint8_t* packed, const std::uint8_t* beyond, std::int64_t beyond_nbytes,
                   std::int64_t numel, std::uint16_t* values) {
    const std::int64_t blocks = blocks_of(numel);
    const Message<const std::uint8_t> message(packed, blocks);
    const bool as_it_is = message.head[0] != 0;
    Stream<const std::uint8_t> stream{as_it_is ? message.planes[0] : message.listed, message.end, beyond,
                                      beyond + beyond_nbytes};
    std::uint16_t padded[BLOCK];
    std::uint8_t exponents[BLOCK];
    const auto take = [&](std::uint8_t& exponent) {
        const std::uint8_t* const next = stream.take();
        if (next != nullptr) exponent = *next;
    };
    for (std::int64_t block = 0; block < blocks; ++block) {
        const bool whole = numel - block * BLOCK >= BLOCK;
        std::uint16_t* part = whole ? values + block * BLOCK : padded;
        for (int at = 0; as_it_is && at < BLOCK; ++at) take(exponents[at]);
        const std::uint8_t base = static_cast<std::uint8_t>(base_of(as_it_is ? 0 : message.largest[block]));
        for (int word = 0; !as_it_is && word < WORDS; ++word) {
            std::uint32_t planes[PLANES];
            for (int plane = 0; plane < PLANES; ++plane) {
                std::memcpy(planes + plane, message.planes[plane] + 4 * (block * WORDS + word), 4);
            }
            std::uint32_t found = from_planes(planes, base, exponents + 32 * word);
            for (; found != 0; found &= found - 1) take(exponents[32 * word + __builtin_ctz(found)]);
        }
        const std::uint8_t* lows = message.lows + block * BLOCK;
        for (int at = 0; at < BLOCK; ++at) {
            part[at] = static_cast<std::uint16_t>((lows[at] & 0x80) << 8 | exponents[at] << 7 | (lows[at] & 0x7f));
        }
        if (!whole) std::copy(padded, padded + (numel - block * BLOCK), values + block * BLOCK);
    }
}

}  // namespace COMMOPT_TARGET
