// Find the smallest key to send in each row, and where in the payload each tile's entries go.
#pragma once

#include "scan.cuh"
#include "select.cuh"

// sparse_histogram: one CUDA block per tile. Counts the keys that agree with what is known of the threshold.
extern "C" __global__ void sparse_histogram(const float* p, long long numel, long long chunk_numel, long long level,
                                            const Threshold* thresholds, unsigned int* bins) {
    const Team team = form_team(TILE_NUMEL);
    const Span span(chunk_numel, numel);
    Tile tile;
    load(team, p + span.begin, span.present, 1.0f, tile);
    count_keys(team, tile, Level(level), thresholds[span.row].key, bins + span.row * BINS);
}

// sparse_threshold: one CUDA block of 256 threads per row. Finds the next bits of its threshold.
extern "C" __global__ void sparse_threshold(const unsigned int* bins, long long level, long long entries,
                                            Threshold* thresholds) {
    constexpr int EACH = BINS / (MAX_WARPS * LANES);
    const unsigned int* row_bins = bins + static_cast<long long>(blockIdx.x) * BINS;
    Threshold& threshold = thresholds[blockIdx.x];
    const unsigned int wanted = level == 0 ? static_cast<unsigned int>(entries) : threshold.wanted;
    const int top = BINS - 1 - static_cast<int>(threadIdx.x) * EACH;   // downwards: largest keys first
    unsigned int counts[EACH];
    unsigned int sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        counts[i] = row_bins[top - i];
        sum += counts[i];
    }
    unsigned int above = scan_block(sum).before;   // its barriers come between all reads of the threshold and the write
    const bool last = threadIdx.x == blockDim.x - 1;
    if (level == 0 && threadIdx.x == 0) {
        unsigned int bad = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) bad += counts[i];
        static_assert((FIRST_KEY_NOT_FINITE >> 20) == BINS - EACH, "the first thread has what is not finite");
        threshold.not_finite = bad != 0;
    }
    if (above >= wanted || (above + sum < wanted && !last)) return;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        if (above + counts[i] >= wanted || (last && i == EACH - 1)) {
            const Level here(level);
            threshold.key = (level == 0 ? 0 : threshold.key) | static_cast<unsigned int>(top - i) << here.low;
            threshold.wanted = wanted - above;
            return;
        }
        above += counts[i];
    }
}

struct Add {
    __device__ __forceinline__ unsigned int operator()(unsigned int a, unsigned int b) const { return a + b; }
};

// sparse_count: one CUDA block per tile. Counts what is above the threshold, and what equals it.
extern "C" __global__ void sparse_count(const float* p, long long numel, long long chunk_numel,
                                        const Threshold* thresholds, Counts* counts) {
    const Team team = form_team(TILE_NUMEL);
    const Span span(chunk_numel, numel);
    const unsigned int least = thresholds[span.row].key;
    Tile tile;
    load(team, p + span.begin, span.present, 1.0f, tile);
    unsigned int both = 0;   // two sums of at most TILE_NUMEL in one
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            const unsigned int key = key_of(tile.value[group][k]);
            both += key > least ? 1u : key == least ? 1u << 16 : 0u;
        }
    }
    both = reduce<Add>(team, both);
    if (threadIdx.x == 0) counts[blockIdx.x] = {both & 0xFFFFu, both >> 16};
}

// sparse_offsets: one CUDA block of 256 threads per row. Turns counts into those of all tiles before, in place, and
// writes what the payload row has beside its entries.
extern "C" __global__ void sparse_offsets(Counts* counts, long long chunk_numel, const Threshold* thresholds,
                                          unsigned char* payload, long long row_stride, long long entries,
                                          long long value_dtype) {
    const long long row = blockIdx.x;
    const long long tiles = (chunk_numel + TILE_NUMEL - 1) / TILE_NUMEL;
    const unsigned int wanted = thresholds[row].wanted;
    const SparseRow target(payload, row_stride, row, chunk_numel, entries, value_dtype);
    Counts* row_counts = counts + row * tiles;
    Counts before{0, 0};
    for (long long first = 0; first < tiles; first += blockDim.x) {
        const long long tile = first + threadIdx.x;
        const Counts own = tile < tiles ? row_counts[tile] : Counts{0, 0};
        const Scanned above = scan_block(own.above);
        const Scanned equal = scan_block(own.equal);
        const Counts start{before.above + above.before, before.equal + equal.before};
        if (tile < tiles) {
            row_counts[tile] = start;
            if ((tile + 1) % REGION_TILES == 0 || tile == tiles - 1) {
                const unsigned int end = start.above + own.above + min(start.equal + own.equal, wanted);
                target.ends()[tile / REGION_TILES] = static_cast<int>(end);
            }
        }
        before.above += above.total;
        before.equal += equal.total;
    }
    if (threadIdx.x == 0) target.clear_gaps();
}
