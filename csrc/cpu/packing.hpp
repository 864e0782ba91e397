// SPDX-License-Identifier: Apache-2.0
// Exponents of bfloat16 in fewer bits; the message is that of commopt/kernels/packing.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vectors.hpp"

namespace COMMOPT_TARGET {

constexpr std::int64_t BLOCK = 256;
constexpr std::int64_t LISTED = 15;   // places of the list, for each block
constexpr int ELSEWHERE = 7;
constexpr int PLANES = 3;

// The parts of a message of so many blocks.
template <typename Byte>
struct Message {
    Byte *lows, *planes[PLANES], *largest, *listed;

    Message(Byte* packed, std::int64_t blocks) {
        lows = packed;
        planes[0] = lows + blocks * BLOCK;
        planes[1] = planes[0] + blocks * BLOCK / 8;
        planes[2] = planes[1] + blocks * BLOCK / 8;
        largest = planes[2] + blocks * BLOCK / 8;
        listed = largest + blocks;
    }
};

// Bit `bit` of eight bytes, the first one's highest.
inline std::uint8_t gathered(std::uint64_t bytes, int bit) {
    return static_cast<std::uint8_t>(((bytes >> bit) & 0x0101010101010101u) * 0x8040201008040201u >> 56);
}

// The other way round.
inline std::uint64_t scattered(std::uint8_t bits) {
    return ((bits * 0x0101010101010101u & 0x0102040810204080u) + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}

inline int base_of(std::uint8_t largest) { return std::max<int>(largest, ELSEWHERE - 1) - (ELSEWHERE - 1); }

// Return whether the values fit.
inline bool pack(const std::uint16_t* values, std::int64_t numel, std::uint8_t* packed) {
    const std::int64_t blocks = (numel + BLOCK - 1) / BLOCK;
    const Message<std::uint8_t> message(packed, blocks);
    std::uint8_t* next = message.listed;
    const std::uint8_t* const end = message.listed + blocks * LISTED;
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
            const std::uint16_t bits = part[at];
            lows[at] = static_cast<std::uint8_t>((bits >> 8 & 0x80) | (bits & 0x7f));
            exponents[at] = static_cast<std::uint8_t>(bits >> 7);
        }
        for (int at = 0; at < BLOCK; ++at) largest = std::max(largest, exponents[at]);
        message.largest[block] = largest;
        const std::uint8_t base = static_cast<std::uint8_t>(base_of(largest));
        for (int at = 0; at < BLOCK; ++at) {
            const std::uint8_t place = static_cast<std::uint8_t>(exponents[at] - base);
            places[at] = std::min<std::uint8_t>(place, ELSEWHERE);
        }
        for (int word = 0; word < BLOCK / 8; ++word) {
            std::uint64_t eight;
            std::memcpy(&eight, places + 8 * word, 8);
            for (int plane = 0; plane < PLANES; ++plane) {
                message.planes[plane][block * (BLOCK / 8) + word] = gathered(eight, plane);
            }
            std::uint64_t found = eight & (eight >> 1) & (eight >> 2) & 0x0101010101010101u;
            if (end - next < 8 && end - next < __builtin_popcountll(found)) return false;
            for (; found != 0; found &= found - 1) *next++ = exponents[8 * word + __builtin_ctzll(found) / 8];
        }
    }
    std::fill(next, const_cast<std::uint8_t*>(end), 0);
    return true;
}

inline void unpack(const std::uint8_t* packed, std::int64_t numel, std::uint16_t* values) {
    const std::int64_t blocks = (numel + BLOCK - 1) / BLOCK;
    const Message<const std::uint8_t> message(packed, blocks);
    const std::uint8_t* next = message.listed;
    const std::uint8_t* const end = message.listed + blocks * LISTED;
    std::uint16_t padded[BLOCK];
    std::uint8_t exponents[BLOCK];
    for (std::int64_t block = 0; block < blocks; ++block) {
        const bool whole = numel - block * BLOCK >= BLOCK;
        std::uint16_t* part = whole ? values + block * BLOCK : padded;
        const std::uint64_t base = 0x0101010101010101u * static_cast<std::uint64_t>(base_of(message.largest[block]));
        for (int word = 0; word < BLOCK / 8; ++word) {
            std::uint64_t eight = 0;
            for (int plane = 0; plane < PLANES; ++plane) {
                eight |= scattered(message.planes[plane][block * (BLOCK / 8) + word]) << plane;
            }
            std::uint64_t found = eight & (eight >> 1) & (eight >> 2) & 0x0101010101010101u;
            eight = (eight & ~(found * ELSEWHERE)) + base;  // no byte exceeds its largest exponent
            std::memcpy(exponents + 8 * word, &eight, 8);
            for (; found != 0 && next != end; found &= found - 1) exponents[8 * word + __builtin_ctzll(found) / 8] = *next++;
        }
        const std::uint8_t* lows = message.lows + block * BLOCK;
        for (int at = 0; at < BLOCK; ++at) {
            part[at] = static_cast<std::uint16_t>((lows[at] & 0x80) << 8 | exponents[at] << 7 | (lows[at] & 0x7f));
        }
        if (!whole) std::copy(padded, padded + (numel - block * BLOCK), values + block * BLOCK);
    }
}

}  // namespace COMMOPT_TARGET
