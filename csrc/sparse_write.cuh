// SPDX-License-Identifier: Apache-2.0
// Write what was selected into payload rows, in ascending order of its elements, and keep what that leaves out.
#pragma once

#include "candidates.cuh"

// Where the entries of a tile go, and what stays behind of its elements.
struct Destination {
    Threshold threshold;
    SparseRow target;
    unsigned int first;   // element of the tile within its region
    int present;          // of the tile's elements
    float* residual;      // of the tile; null: nothing is kept
    float inverse;        // of the loss scale

    // Return whether the element is chosen. `before` counts what precedes it in its row.
    __device__ __forceinline__ bool write(float value, int element, const Counts& before) const {
        const unsigned int key = key_of(value);
        if (key < threshold.key || (key == threshold.key && before.equal >= threshold.wanted)) return false;
        const unsigned int entry = before.above + min(before.equal, threshold.wanted);
        const bool spoils = entry == 0 && threshold.not_finite != 0;
        target.indices()[entry] = static_cast<unsigned short>(first + element);
        const float sent = target.write_value(entry, spoils ? __uint_as_float(0x7FC00000u) : value);
        if (element < present && residual != nullptr) {
            residual[element] = __fmul_rn(__fsub_rn(value, sent), inverse);
        }
        return true;
    }
};

// A warp writes elements in ascending order. `before` counts what precedes them in their row.
struct Writer {
    const Destination& destination;
    Counts before;

    // Return whether the lane's is chosen.
    __device__ __forceinline__ bool write(float value, int element) {
        const unsigned int key = key_of(value);
        const unsigned int above = vote(key > destination.threshold.key);
        const unsigned int equal = vote(key == destination.threshold.key);
        const Counts own{before.above + before_lane(above), before.equal + before_lane(equal)};
        before = {before.above + __popc(above), before.equal + __popc(equal)};
        return destination.write(value, element, own);
    }
};

// sparse_write: one CUDA block of 256 threads per group. `before` tells what earlier tiles of the row have. With
// `keeps`, p becomes the new residual: without a loss scale it changes only where something is sent.
extern "C" __global__ void sparse_write(float* p, long long numel, long long chunk_numel, const Threshold* thresholds,
                                        const Candidates* candidates, const Counts* before, unsigned char* payload,
                                        long long row_stride, long long entries, long long value_dtype, long long keeps,
                                        const float* loss_scale) {
    const bool rescales = keeps && loss_scale != nullptr;
    const Group group(chunk_numel, blockIdx.x);
    const Visit visit(group, candidates, rescales);
    const float inverse = rescales ? __fdiv_rn(1.0f, *loss_scale) : 1.0f;
    const Threshold threshold = thresholds[group.row];
    const SparseRow target(payload, row_stride, group.row, chunk_numel, entries, value_dtype);
    const auto destination_of = [&](const Span& span) {
        return Destination{threshold,
                           target,
                           static_cast<unsigned int>(span.tile % REGION_TILES * TILE_NUMEL),
                           span.present,
                           keeps ? p + span.begin : nullptr,
                           inverse};
    };
    if (visit.few) {
        const Candidates& own = candidates[group.index(group.own)];
        const Destination destination = destination_of(group.span(numel, group.own));
        Writer writer{destination, before[group.index(group.own)]};
#pragma unroll 1
        for (unsigned int first = 0; first < visit.number; first += LANES) {
            const unsigned int slot = first + lane_of_thread();
            const bool exists = slot < visit.number;
            writer.write(exists ? own.value[slot] : 0.0f, exists ? own.element[slot] : 0);
        }
    }
    for (unsigned int tile = 0; tile < group.tiles; ++tile) {
        if (!visit.in_full(tile)) continue;
        const Span span = group.span(numel, tile);
        const Share<float> share = warp_share(p, span);
        const Strip<STEPS> strip = share.read();
        const Comparison comparison = compare(strip, threshold.key);
        const Counts of_warps = apart(scan_warps(comparison.both).before);
        const Counts of_tiles = before[group.index(tile)];
        const Destination destination = destination_of(span);
        Writer writer{destination, {of_tiles.above + of_warps.above, of_tiles.equal + of_warps.equal}};
        unsigned int sent = 0;   // a bit for each step of the lane
#pragma unroll 1
        for (unsigned int steps = comparison.steps; steps != 0; steps &= steps - 1) {
            const int step = __ffs(static_cast<int>(steps)) - 1;   // the registers of `strip` have no index
            const float value = share.exists(step) ? share.at[step * LANES] : 0.0f;
            if (writer.write(value, share.element + step * LANES)) sent |= 1u << step;
        }
        if (!rescales) continue;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const bool stays = share.exists(step) && (sent >> step & 1) == 0;
            if (stays) share.at[step * LANES] = __fmul_rn(strip.value[step], inverse);
        }
    }
}
