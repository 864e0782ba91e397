// SPDX-License-Identifier: Apache-2.0
// Payload rows, one per chunk: the codes of its elements, packed little-endian, then an entry per block, then zeros up
// to a multiple of 16 bytes.
#pragma once

#include "team.cuh"

struct Rows {
    unsigned char* bytes;
    long long stride;        // in bytes; rows need not be adjacent
    long long rows;
    long long row_blocks;    // blocks in a row
    long long block_numel;

    __device__ __forceinline__ long long blocks() const { return rows * row_blocks; }

    template <int MEMBERS>
    __device__ __forceinline__ bool holds(const Team<MEMBERS>& team) const {
        return team.block < blocks();
    }

    // The block's first element, counted over all chunks.
    template <int MEMBERS>
    __device__ __forceinline__ long long first_element(const Team<MEMBERS>& team) const {
        return team.block * block_numel;
    }

    // Whether the thread's group is in the block.
    template <int MEMBERS>
    __device__ __forceinline__ bool holds(const Team<MEMBERS>& team, int group) const {
        return MEMBERS < LANES || team.element(group) < static_cast<int>(block_numel);   // a short one is full
    }

    // How many of the block's elements exist when there are `numel`.
    template <int MEMBERS>
    __device__ __forceinline__ int present(const Team<MEMBERS>& team, long long numel) const {
        return team.idle ? 0 : static_cast<int>(max(0ll, min(numel - first_element(team), block_numel)));
    }
};

template <int BITS>
struct Word;   // what holds a group's codes

template <>
struct Word<8> {
    using Type = unsigned int;
};

template <>
struct Word<4> {
    using Type = unsigned short;
};

template <>
struct Word<2> {
    using Type = unsigned char;
};

template <>
struct Word<1> {
    using Type = unsigned char;   // together with the neighbouring thread's
};

static_assert(WIDTH == 4, "a group's codes fill a Word");

// Where the thread's codes and the entry of the team's block are.
template <int BITS, int MEMBERS>
struct Place {
    using Word = typename ::Word<BITS>::Type;
    unsigned char* codes;   // of the thread's first group
    unsigned int* entry;
    bool last;   // of its row

    __device__ __forceinline__ Place(const Rows& rows, const Team<MEMBERS>& team) {
        const unsigned int blocks = static_cast<unsigned int>(rows.row_blocks);
        const unsigned int row = team.block / blocks;
        const unsigned int block = team.block % blocks;
        unsigned char* start = rows.bytes + row * rows.stride;
        codes = start + (block * rows.block_numel + team.first) * BITS / 8;
        entry = reinterpret_cast<unsigned int*>(start + blocks * rows.block_numel * BITS / 8) + block;
        last = block == blocks - 1;
    }

    // The same block, `count` rows further.
    __device__ __forceinline__ void advance(const Rows& rows, long long count) {
        codes += count * rows.stride;
        entry = reinterpret_cast<unsigned int*>(reinterpret_cast<unsigned char*>(entry) + count * rows.stride);
    }

    __device__ __forceinline__ Word& word(int group) const {
        return *reinterpret_cast<Word*>(codes + group * (Team<MEMBERS>::STRIDE * BITS / 8));
    }

    // Every thread of the warp must call, those whose group is not `inside` the block too.
    __device__ __forceinline__ void write_codes(const Team<MEMBERS>& team, int group, bool inside,
                                                unsigned int codes) const {
        if (BITS == 1) {
            codes |= __shfl_xor_sync(0xFFFFFFFFu, codes, 1) << WIDTH;
            inside = inside && team.first % 8 == 0;
        }
        if (inside && !team.idle) word(group) = static_cast<Word>(codes);
    }

    // One thread writes the entry and, behind the last one of a row, the zeros.
    __device__ __forceinline__ void write_entry(const Team<MEMBERS>& team, unsigned int value) const {
        if (team.first != 0 || team.idle) return;
        *entry = value;
        if (!last) return;
        for (unsigned int* word = entry + 1; reinterpret_cast<unsigned long long>(word) % 16 != 0; ++word) *word = 0;
    }
};

// The codes of the thread's group in a word.
template <int BITS, int MEMBERS>
__device__ __forceinline__ unsigned int own_codes(const Team<MEMBERS>& team, unsigned int word) {
    return BITS == 1 ? word >> team.first % 8 : word;
}
