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

    __device__ __forceinline__ bool holds(const Team& team) const { return team.block < rows * row_blocks; }

    // The block's first element, counted over all chunks.
    __device__ __forceinline__ long long first_element(const Team& team) const { return team.block * block_numel; }

    // How many of the block's elements exist when there are `numel`.
    __device__ __forceinline__ int present(const Team& team, long long numel) const {
        return static_cast<int>(max(0ll, min(numel - first_element(team), block_numel)));
    }
};

// Where the codes and the entry of the team's block are.
template <int BITS>
struct Place {
    unsigned char* codes;
    unsigned int* entry;
    bool last;   // of its row

    __device__ __forceinline__ Place(const Rows& rows, const Team& team) {
        const unsigned int blocks = static_cast<unsigned int>(rows.row_blocks);
        const unsigned int row = team.block / blocks;
        const unsigned int block = team.block % blocks;
        unsigned char* start = rows.bytes + row * rows.stride;
        codes = start + block * rows.block_numel * BITS / 8;
        entry = reinterpret_cast<unsigned int*>(start + blocks * rows.block_numel * BITS / 8) + block;
        last = block == blocks - 1;
    }

    // The same block, `count` rows further.
    __device__ __forceinline__ void advance(const Rows& rows, long long count) {
        codes += count * rows.stride;
        entry = reinterpret_cast<unsigned int*>(reinterpret_cast<unsigned char*>(entry) + count * rows.stride);
    }

    // One thread writes the entry and, behind the last one of a row, the zeros.
    __device__ __forceinline__ void write_entry(const Team& team, unsigned int value) const {
        if (team.first != 0) return;
        *entry = value;
        if (!last) return;
        for (unsigned int* word = entry + 1; reinterpret_cast<unsigned long long>(word) % 16 != 0; ++word) *word = 0;
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

template <int BITS>
__device__ __forceinline__ unsigned int read_codes(const unsigned char* codes, int element) {
    const unsigned int word = *reinterpret_cast<const typename Word<BITS>::Type*>(codes + element * BITS / 8);
    return BITS == 1 ? word >> element % 8 : word;
}

template <int BITS>
__device__ __forceinline__ unsigned int code_of(unsigned int word, int k) {
    return word >> k * BITS & ((1u << BITS) - 1);
}

// Every thread of the warp must call, those whose group is not `inside` the block too.
template <int BITS>
__device__ __forceinline__ void write_codes(unsigned char* codes, int element, bool inside, unsigned int word) {
    if (BITS == 1) {
        word |= __shfl_xor_sync(0xFFFFFFFFu, word, 1) << WIDTH;
        inside = inside && element % 8 == 0;
    }
    if (inside) {
        *reinterpret_cast<typename Word<BITS>::Type*>(codes + element * BITS / 8) =
            static_cast<typename Word<BITS>::Type>(word);
    }
}
