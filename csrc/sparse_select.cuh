// SPDX-License-Identifier: Apache-2.0
// Find the smallest key to send in each row, and where in the payload each tile's entries go.
#pragma once

#include "candidates.cuh"

template <int COUNT>
__device__ __forceinline__ void count_bins(const Histogram& histogram, const Strip<COUNT>& strip) {
#pragma unroll
    for (int step = 0; step < COUNT; ++step) histogram.count(strip.value[step]);
}

// Keep the candidates among the elements that the tile has kept until now, and count them.
__device__ __forceinline__ unsigned int collect_kept(const Histogram& histogram, Candidates& candidates) {
    const unsigned int kept = candidates.number;
    const Strip<SLOT_STEPS> strip = candidates.read(kept);
    int element[SLOT_STEPS];
#pragma unroll
    for (int step = 0; step < SLOT_STEPS; ++step) {
        const unsigned int slot = step * LANES + lane_of_thread();
        element[step] = slot < kept ? candidates.element[slot] : 0;
    }
    __syncwarp();   // all have been read, and are overwritten
    unsigned int number = 0;
#pragma unroll
    for (int step = 0; step < SLOT_STEPS; ++step) {
        const bool can_be_selected = key_of(strip.value[step]) >= histogram.found;
        if (can_be_selected) histogram.count(strip.value[step]);
        number = candidates.append(can_be_selected, strip.value[step], element[step], number);
    }
    return number;
}

// sparse_collect: one CUDA block of 256 threads per group. Each warp finds the candidates of its tile, and counts their
// bins of the second level.
extern "C" __global__ void sparse_collect(const float* p, long long numel, long long chunk_numel,
                                          const Threshold* thresholds, Candidates* candidates, unsigned int* bins) {
    __shared__ unsigned int block_bins[BINS];
    const Group group(chunk_numel, blockIdx.x);
    const Histogram histogram{Level(1), thresholds[group.row].key, block_bins};
    histogram.clear();
    __syncthreads();
    if (group.own < group.tiles) {
        Candidates& target = candidates[group.index(group.own)];
        unsigned int number = CAPACITY + 1;
        if (target.reach(histogram.found)) {
            number = collect_kept(histogram, target);
        } else {
            const Span span = group.span(numel, group.own);
#pragma unroll 1
            for (int first = 0; first < TILE_NUMEL; first += WARP_NUMEL) {
                count_bins(histogram, Share<const float>(p, span, first).read());
            }
        }
        if (lane_of_thread() == 0) target.number = number;
    }
    __syncthreads();
    histogram.add_to(bins + static_cast<long long>(group.row) * BINS);
}

// sparse_histogram: one CUDA block of 256 threads per group. Counts the candidates' bins of the last level.
extern "C" __global__ void sparse_histogram(const float* p, long long numel, long long chunk_numel,
                                            const Threshold* thresholds, const Candidates* candidates,
                                            unsigned int* bins) {
    __shared__ unsigned int block_bins[BINS];
    const Group group(chunk_numel, blockIdx.x);
    const Visit visit(group, candidates, false);
    const Histogram histogram{Level(2), thresholds[group.row].key, block_bins};
    histogram.clear();
    __syncthreads();
    if (visit.few) count_bins(histogram, candidates[group.index(group.own)].read(visit.number));
    for (unsigned int tile = 0; tile < group.tiles; ++tile) {
        if (visit.in_full(tile)) count_bins(histogram, warp_share(p, group.span(numel, tile)).read());
    }
    __syncthreads();
    histogram.add_to(bins + static_cast<long long>(group.row) * BINS);
}

// sparse_threshold: one CUDA block of 256 threads per row. Finds the next bits of its threshold.
extern "C" __global__ void sparse_threshold(const unsigned int* bins, long long level, long long entries,
                                            Threshold* thresholds) {
    constexpr int EACH = BINS / BLOCK_THREADS;
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

// sparse_count: one CUDA block of 256 threads per group. Counts what is above the threshold, and what equals it.
extern "C" __global__ void sparse_count(const float* p, long long numel, long long chunk_numel,
                                        const Threshold* thresholds, const Candidates* candidates, Counts* counts) {
    const Group group(chunk_numel, blockIdx.x);
    const Visit visit(group, candidates, false);
    const unsigned int least = thresholds[group.row].key;
    if (visit.few) {
        const unsigned int both = compare(candidates[group.index(group.own)].read(visit.number), least).both;
        if (lane_of_thread() == 0) counts[group.index(group.own)] = apart(both);
    }
    for (unsigned int tile = 0; tile < group.tiles; ++tile) {
        if (!visit.in_full(tile)) continue;
        const Scanned both = scan_warps(compare(warp_share(p, group.span(numel, tile)).read(), least).both);
        if (threadIdx.x == 0) counts[group.index(tile)] = apart(both.total);
    }
}

// sparse_offsets: one CUDA block of 256 threads per row. Turns counts into those of all tiles before, in place, and
// writes what the payload row has beside its entries.
extern "C" __global__ void sparse_offsets(Counts* counts, long long chunk_numel, const Threshold* thresholds,
                                          unsigned char* payload, long long row_stride, long long entries,
                                          long long value_dtype) {
    constexpr int EACH = 8;   // a thread's tiles, so that a long row needs few scans
    const long long row = blockIdx.x;
    const long long tiles = tiles_of(chunk_numel);
    const unsigned int wanted = thresholds[row].wanted;
    const SparseRow target(payload, row_stride, row, chunk_numel, entries, value_dtype);
    Counts* row_counts = counts + row * tiles;
    Counts before{0, 0};
    for (long long first = threadIdx.x * EACH; first - threadIdx.x * EACH < tiles; first += BLOCK_THREADS * EACH) {
        Counts own[EACH];
        Counts sum{0, 0};
#pragma unroll
        for (int i = 0; i < EACH; ++i) own[i] = first + i < tiles ? row_counts[first + i] : Counts{0, 0};
#pragma unroll
        for (int i = 0; i < EACH; ++i) sum = {sum.above + own[i].above, sum.equal + own[i].equal};
        const Scanned above = scan_block(sum.above);
        const Scanned equal = scan_block(sum.equal);
        Counts start{before.above + above.before, before.equal + equal.before};
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const long long tile = first + i;
            if (tile >= tiles) break;
            row_counts[tile] = start;
            start = {start.above + own[i].above, start.equal + own[i].equal};
            if ((tile + 1) % REGION_TILES == 0 || tile == tiles - 1) {
                target.ends()[tile / REGION_TILES] = static_cast<int>(start.above + min(start.equal, wanted));
            }
        }
        before = {before.above + above.total, before.equal + equal.total};
    }
    if (threadIdx.x == 0) target.clear_gaps();
}
