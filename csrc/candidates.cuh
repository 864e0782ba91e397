// The few elements that can still be selected once the first level is known, and how a CUDA block visits them.
//
// The threshold is then known up to an eighth of an octave. Of 4096 elements of a bell curve, 8 are candidates where 4
// are selected, and 50 where 41 are. A tile with more of them than slots, be it of a layer with large gradients, of
// equal values, or of a row with too few elements that are not zero, is read in full instead: that is decided tile by
// tile, on the device.
#pragma once

#include "scan.cuh"
#include "select.cuh"

constexpr int CAPACITY = 256;

// The elements of a tile whose key is not below what the first level has found, in ascending order of element. Zeros
// never are among them: where the key zero is not too small, all elements of a tile are candidates, too many.
struct Candidates {
    float value[CAPACITY];
    unsigned short element[CAPACITY];   // within the tile
    unsigned int number;                // the slots hold them only if there are at most CAPACITY
};

// A warp's share of a tile, or the candidates of one: visited in ascending order of element, by step, then by lane.
struct Share {
    static constexpr int STEPS = WARP_NUMEL / LANES;

    const float* tile;
    int present;
    int first;   // element of the lane, in the tile

    __device__ __forceinline__ Share(const float* p, const Span& span)
        : tile(p + span.begin),
          present(span.present),
          first(static_cast<int>(threadIdx.x) / LANES * WARP_NUMEL + static_cast<int>(threadIdx.x) % LANES) {}

    __device__ __forceinline__ int steps() const { return STEPS; }

    __device__ __forceinline__ int element(int step) const { return first + step * LANES; }

    __device__ __forceinline__ float value(int step) const {
        return element(step) < present ? tile[element(step)] : 0.0f;
    }
};

struct Kept {
    static constexpr int STEPS = CAPACITY / LANES;

    const Candidates& candidates;
    unsigned int number;

    __device__ __forceinline__ int steps() const { return static_cast<int>(number + LANES - 1) / LANES; }

    __device__ __forceinline__ unsigned int slot(int step) const { return step * LANES + threadIdx.x % LANES; }

    __device__ __forceinline__ int element(int step) const {
        return slot(step) < number ? candidates.element[slot(step)] : 0;
    }

    __device__ __forceinline__ float value(int step) const {
        return slot(step) < number ? candidates.value[slot(step)] : 0.0f;
    }
};

// The values of all steps. Their loads leave before the first is waited for.
template <typename Source>
struct Strip {
    float value[Source::STEPS];

    __device__ __forceinline__ explicit Strip(const Source& source) {
#pragma unroll
        for (int step = 0; step < Source::STEPS; ++step) value[step] = source.value(step);
    }
};

// How many of the warp's elements are above the threshold, and how many equal it, in the upper half: at most
// TILE_NUMEL, even when summed over a CUDA block.
template <typename Source>
__device__ __forceinline__ unsigned int compare(const Source& source, unsigned int least) {
    const Strip<Source> strip(source);
    unsigned int above = 0;
    unsigned int equal = 0;
#pragma unroll
    for (int step = 0; step < Source::STEPS; ++step) {
        const unsigned int key = key_of(strip.value[step]);
        above += __popc(__ballot_sync(0xFFFFFFFFu, key > least));
        equal += __popc(__ballot_sync(0xFFFFFFFFu, key == least));
    }
    return above | equal << 16;
}

__device__ __forceinline__ Counts apart(unsigned int both) { return {both & 0xFFFFu, both >> 16}; }

// The tiles that a CUDA block visits: one for each of its warps, all of one row. Each warp visits the candidates of its
// own tile. Then all of them visit, one after the other, the tiles that are to be read in full.
struct Group {
    const Candidates* candidates;
    long long chunk_numel;
    unsigned int tiles_of_row;
    unsigned int row;
    unsigned int first;      // tile of the row
    unsigned int tiles;
    unsigned int own;        // the warp's, counted from the first
    unsigned int full;       // a bit for each tile
    unsigned int number;     // of candidates of the warp's tile

    __device__ __forceinline__ Group(long long chunk_numel, const Candidates* candidates, bool all_in_full)
        : candidates(candidates),
          chunk_numel(chunk_numel),
          tiles_of_row(tiles_of(chunk_numel)),
          own(threadIdx.x / LANES) {
        const unsigned int groups = (tiles_of_row + MAX_WARPS - 1) / MAX_WARPS;
        row = blockIdx.x / groups;
        first = blockIdx.x % groups * MAX_WARPS;
        tiles = min(tiles_of_row - first, static_cast<unsigned int>(MAX_WARPS));
        const unsigned int lane = threadIdx.x % LANES;
        const unsigned int of_lane = lane < tiles ? candidates[index(lane)].number : 0;
        full = __ballot_sync(0xFFFFFFFFu, lane < tiles && (all_in_full || of_lane > CAPACITY));
        number = __shfl_sync(0xFFFFFFFFu, of_lane, static_cast<int>(own));
    }

    // Counted over all rows.
    __device__ __forceinline__ long long index(unsigned int tile) const {
        return static_cast<long long>(row) * tiles_of_row + first + tile;
    }

    __device__ __forceinline__ Span span(long long numel, unsigned int tile) const {
        return Span(chunk_numel, numel, row, first + tile);
    }

    __device__ __forceinline__ bool in_full(unsigned int tile) const { return (full >> tile & 1) != 0; }

    // Whether the warp has candidates to visit.
    __device__ __forceinline__ bool fits() const { return own < tiles && !in_full(own); }

    __device__ __forceinline__ Kept kept() const { return {candidates[index(own)], number}; }
};
