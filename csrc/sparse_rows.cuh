// SPDX-License-Identifier: Apache-2.0
// How rows of values are cut up for sparse payloads, and where in a payload row things lie.
//
// A row of values is one chunk. CUDA blocks take tiles of it. In the payload, indices are 16 bits wide and relative to
// the region of 65536 elements that the entry is in.
#pragma once

#include "team.cuh"

constexpr int TILE_NUMEL = MAX_WARPS * WARP_NUMEL;   // what a CUDA block of MAX_WARPS warps holds
constexpr int BLOCK_THREADS = MAX_WARPS * LANES;
constexpr int REGION_NUMEL = 65536;
constexpr int REGION_TILES = REGION_NUMEL / TILE_NUMEL;

// The key that elements are selected by: as integers, finite < infinity < NaN.
__device__ __forceinline__ unsigned int key_of(float value) { return __float_as_uint(value) & 0x7FFFFFFFu; }

constexpr unsigned int FIRST_KEY_NOT_FINITE = 0x7F800000u;

__device__ __forceinline__ unsigned int tiles_of(long long chunk_numel) {   // no more than a grid has blocks
    return static_cast<unsigned int>((chunk_numel + TILE_NUMEL - 1) / TILE_NUMEL);
}

// A tile of a row.
struct Span {
    long long row;
    long long tile;
    long long begin;   // its first element, counted over all rows
    int present;       // how many of its elements exist; the others count as zero, and the selection takes them last

    __device__ __forceinline__ Span(long long chunk_numel, long long numel, unsigned int row, unsigned int tile)
        : row(row), tile(tile) {
        const long long first = this->tile * TILE_NUMEL;
        begin = row * chunk_numel + first;
        const long long inside = min(chunk_numel - first, static_cast<long long>(TILE_NUMEL));
        present = static_cast<int>(max(0ll, min(numel - begin, inside)));
    }

    // `index` counts over all rows.
    __device__ __forceinline__ Span(long long chunk_numel, long long numel, unsigned int index)
        : Span(chunk_numel, numel, index / tiles_of(chunk_numel), index % tiles_of(chunk_numel)) {}
};

// [ends of the regions: int32][indices: uint16][values], each section at a multiple of 4 bytes, zeros up to one of 16.
struct SparseRow {
    unsigned char* bytes;
    long long entries;   // how many elements of a chunk travel
    long long regions;
    long long value_dtype;

    __device__ __forceinline__ SparseRow(unsigned char* payload, long long stride, long long row, long long chunk_numel,
                                         long long entries, long long value_dtype)
        : bytes(payload + row * stride),
          entries(entries),
          regions((chunk_numel + REGION_NUMEL - 1) / REGION_NUMEL),
          value_dtype(value_dtype) {}

    // ends()[r]: how many entries are in regions 0 to r.
    __device__ __forceinline__ int* ends() const { return reinterpret_cast<int*>(bytes); }

    // Within the entry's region.
    __device__ __forceinline__ unsigned short* indices() const {
        return reinterpret_cast<unsigned short*>(bytes + 4 * regions);
    }

    template <typename T>
    __device__ __forceinline__ T* values() const {
        return reinterpret_cast<T*>(bytes + 4 * regions + (2 * entries + 3) / 4 * 4);
    }

    __device__ __forceinline__ float value(long long entry) const {
        switch (value_dtype) {
            case FLOAT32: return values<float>()[entry];
            case FLOAT16: return to_float(values<Half>()[entry]);
            default: return to_float(values<Bfloat16>()[entry]);
        }
    }

    // Return what a receiver will read.
    __device__ __forceinline__ float write_value(long long entry, float value) const {
        switch (value_dtype) {
            case FLOAT32: return values<float>()[entry] = value;
            case FLOAT16: return to_float(values<Half>()[entry] = from_float<Half>(value));
            default: return to_float(values<Bfloat16>()[entry] = from_float<Bfloat16>(value));
        }
    }

    // One thread zeroes what lies between and behind the sections.
    __device__ __forceinline__ void clear_gaps() const {
        if (entries % 2 == 1) indices()[entries] = 0;
        unsigned char* end = values<unsigned char>() + entries * (value_dtype == FLOAT32 ? 4 : 2);
        while (reinterpret_cast<unsigned long long>(end) % 16 != 0) *end++ = 0;
    }
};
