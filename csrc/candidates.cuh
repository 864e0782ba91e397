// SPDX-License-Identifier: Apache-2.0
// The few elements that can still be selected once the first level is known, and how a CUDA block visits them.
//
// While p is written each tile keeps its largest elements, as many as there are slots for: from a bin of the first
// level on. If the threshold turns out to be there or above, the candidates are among them and p is not read again;
// if not, there are too many of them.
//
// The threshold is then known up to an eighth of an octave: of 4096 elements of a bell curve, at most 15 are candidates
// where 4 are selected, and at most 95 where 41 are. A tile with more of them than slots, be it of a layer with large
// gradients, of equal values, or of a row with too few elements that are not zero, is read in full instead: that is
// decided tile by tile, on the device.
#pragma once

#include "scan.cuh"
#include "select.cuh"
#include "strip.cuh"

constexpr int CAPACITY = 256;   // 1544 bytes a tile, 3/8 byte an element
constexpr int SLOT_STEPS = CAPACITY / LANES;

// The elements of a tile whose key is not below what the first level has found, in ascending order. Zeros are never
// among them: where zero is not too small, the tile is read in full.
struct Candidates {
    float value[CAPACITY];
    unsigned short element[CAPACITY];   // within the tile
    unsigned int number;                // if larger than CAPACITY, the slots are of no use
    unsigned int floor;                 // at first: the slots have every element whose key is not below, but no zeros

    // Whether the slots have all elements from the first level's threshold on. At zero, zeros can be selected too.
    __device__ __forceinline__ bool reach(unsigned int found) const { return found != 0 && floor <= found; }

    // Append the elements of a step of the warp that are kept; `slots` are taken. Return how many are taken then.
    __device__ __forceinline__ unsigned int append(bool keep, float value, int element, unsigned int slots) {
        const unsigned int those = vote(keep);
        if (those == 0) return slots;   // as nearly always
        const unsigned int slot = slots + before_lane(those);
        if (keep) {
            this->value[slot] = value;
            this->element[slot] = static_cast<unsigned short>(element);
        }
        return slots + __popc(those);
    }

    // The lane's values; behind the last candidate they are +0. All loads leave before the first is waited for.
    __device__ __forceinline__ Strip<SLOT_STEPS> read(unsigned int count) const {
        Strip<SLOT_STEPS> strip;
#pragma unroll
        for (int step = 0; step < SLOT_STEPS; ++step) {
            const unsigned int slot = step * LANES + lane_of_thread();
            strip.value[step] = slot < count ? value[slot] : 0.0f;
        }
        return strip;
    }
};

// Tiles of a row, one for each warp of a CUDA block.
struct Group {
    long long chunk_numel;
    unsigned int tiles_of_row;
    unsigned int row;
    unsigned int first;   // tile of the row
    unsigned int tiles;
    unsigned int own;     // the warp's tile, as all below counted from the first; there may be none

    // `group` counts over all rows.
    __device__ __forceinline__ Group(long long chunk_numel, unsigned int group)
        : chunk_numel(chunk_numel), tiles_of_row(tiles_of(chunk_numel)), own(warp_of_thread()) {
        const unsigned int groups = (tiles_of_row + MAX_WARPS - 1) / MAX_WARPS;
        row = group / groups;
        first = group % groups * MAX_WARPS;
        tiles = min(tiles_of_row - first, static_cast<unsigned int>(MAX_WARPS));
    }

    // Which of all rows' tiles.
    __device__ __forceinline__ long long index(unsigned int tile) const {
        return static_cast<long long>(row) * tiles_of_row + first + tile;
    }

    __device__ __forceinline__ Span span(long long numel, unsigned int tile) const {
        return Span(chunk_numel, numel, row, first + tile);
    }
};

// How a CUDA block visits a group: first every warp the candidates of its own tile, if they are all there; then all of
// them, tile after tile, what must be read in full.
struct Visit {
    unsigned int full;     // a bit for each tile
    unsigned int number;   // of candidates of the warp's tile
    bool few;              // whether the warp has candidates to visit

    __device__ __forceinline__ Visit(const Group& group, const Candidates* candidates, bool all_in_full) {
        const unsigned int tile = lane_of_thread();
        const unsigned int of_lane = tile < group.tiles ? candidates[group.index(tile)].number : 0;
        full = vote(tile < group.tiles && (all_in_full || of_lane > CAPACITY));
        number = __shfl_sync(0xFFFFFFFFu, of_lane, static_cast<int>(group.own));
        few = group.own < group.tiles && !in_full(group.own);
    }

    __device__ __forceinline__ bool in_full(unsigned int tile) const { return (full >> tile & 1) != 0; }
};

// A warp's elements against the threshold.
struct Comparison {
    unsigned int both;    // how many are above, and, in the upper half, how many equal it: at most TILE_NUMEL, even
                          // when summed over a CUDA block
    unsigned int steps;   // a bit for each step that has such elements
};

template <int COUNT>
__device__ __forceinline__ Comparison compare(const Strip<COUNT>& strip, unsigned int least) {
    Comparison result{0, 0};
#pragma unroll
    for (int step = 0; step < COUNT; ++step) {
        const unsigned int key = key_of(strip.value[step]);
        const unsigned int above = vote(key > least);
        const unsigned int equal = vote(key == least);
        result.both += __popc(above) + (__popc(equal) << 16);
        if ((above | equal) != 0) result.steps |= 1u << step;
    }
    return result;
}

__device__ __forceinline__ Counts apart(unsigned int both) { return {both & 0xFFFFu, both >> 16}; }
