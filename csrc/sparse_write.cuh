// Write what was selected into payload rows, in ascending order of its elements, and keep what that leaves out.
#pragma once

#include "candidates.cuh"

// Where the entries of a row go, and what stays behind.
struct Destination {
    Threshold threshold;
    SparseRow target;
    float* residual;      // the row's tile of p; null: nothing is kept
    float* velocity;      // null: none
    float inverse;        // of the loss scale
    bool rescales;        // also what is not sent
    int present;          // of the tile's elements
    unsigned int first;   // element of the tile within its region

    // `before` counts what precedes the element in its row.
    __device__ __forceinline__ void write(float value, int element, const Counts& before) const {
        const unsigned int key = key_of(value);
        const bool chosen = key > threshold.key || (key == threshold.key && before.equal < threshold.wanted);
        float kept = value;
        if (chosen) {
            const unsigned int entry = before.above + min(before.equal, threshold.wanted);
            const bool spoils = entry == 0 && threshold.not_finite != 0;
            target.indices()[entry] = static_cast<unsigned short>(first + element);
            kept = __fsub_rn(value, target.write_value(entry, spoils ? __uint_as_float(0x7FC00000u) : value));
        }
        if (element >= present) return;
        if (residual != nullptr && (chosen || rescales)) residual[element] = __fmul_rn(kept, inverse);
        if (velocity != nullptr && chosen) velocity[element] = 0.0f;
    }
};

// A warp writes elements in ascending order. `before` counts what precedes them in their row.
struct Writer {
    const Destination& destination;
    Counts before;

    __device__ __forceinline__ void write(float value, int element) {
        const unsigned int key = key_of(value);
        const unsigned int above = vote(key > destination.threshold.key);
        const unsigned int equal = vote(key == destination.threshold.key);
        if ((above | equal) != 0 || destination.rescales) {
            destination.write(value, element,
                              {before.above + before_lane(above), before.equal + before_lane(equal)});
        }
        before = {before.above + __popc(above), before.equal + __popc(equal)};
    }
};

// sparse_write: one CUDA block of 256 threads per group. `before` tells what earlier tiles of the row have. With `keeps`
// p becomes the new residual: without a loss scale it changes only where something is sent. There the velocity, if any,
// becomes zero.
extern "C" __global__ void sparse_write(float* p, long long numel, long long chunk_numel, const Threshold* thresholds,
                                        const Candidates* candidates, const Counts* before, unsigned char* payload,
                                        long long row_stride, long long entries, long long value_dtype, long long keeps,
                                        const float* loss_scale, float* velocity) {
    const bool rescales = keeps && loss_scale != nullptr;
    const Group group(chunk_numel, blockIdx.x);
    const Visit visit(group, candidates, rescales);
    const float inverse = rescales ? __fdiv_rn(1.0f, *loss_scale) : 1.0f;
    const Threshold threshold = thresholds[group.row];
    const SparseRow target(payload, row_stride, group.row, chunk_numel, entries, value_dtype);
    const auto destination = [&](const Span& span) {
        return Destination{threshold,
                           target,
                           keeps ? p + span.begin : nullptr,
                           velocity == nullptr ? nullptr : velocity + span.begin,
                           inverse,
                           rescales,
                           span.present,
                           static_cast<unsigned int>(span.tile % REGION_TILES * TILE_NUMEL)};
    };
    if (visit.few) {
        const Candidates& own = candidates[group.index(group.own)];
        const Destination here = destination(group.span(numel, group.own));
        Writer writer{here, before[group.index(group.own)]};
#pragma unroll 1
        for (unsigned int first = 0; first < visit.number; first += LANES) {
            const unsigned int slot = first + lane_of_thread();   // values of earlier
            writer.write(slot < visit.number ? own.value[slot] : 0.0f, own.element[slot]);
        }
    }
    for (unsigned int tile = 0; tile < group.tiles; ++tile) {
        if (!visit.in_full(tile)) continue;
        const Span span = group.span(numel, tile);
        const Share<float> share = warp_share(p, span);
        const Counts of_warps = apart(scan_warps(compare(share.read(), threshold.key)).before);
        const Counts of_tiles = before[group.index(tile)];
        const Destination here = destination(span);
        Writer writer{here, {of_tiles.above + of_warps.above, of_tiles.equal + of_warps.equal}};
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {   // read again, from the cache: unrolled, this would be long
            writer.write(share.exists(step) ? share.at[step * LANES] : 0.0f, share.element + step * LANES);
        }
    }
}
