// SPDX-License-Identifier: Apache-2.0
// Elements of a buffer in parts, which the kernels of block quantization read and write where they are.
#pragma once

#include "team.cuh"

struct Part {
    long long from;    // the first element in the buffer
    long long to;      // the same among the elements
    long long numel;
};

// In the order of the elements, of which none is missing. count 0: the elements lie one after the other.
struct Parts {
    const Part* first;
    long long count;

    // The part that an element is in.
    __device__ __forceinline__ const Part* of(long long element) const {
        long long low = 0, high = count - 1;
        while (low < high) {
            const long long middle = (low + high + 1) / 2;
            if (first[middle].to <= element) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        return first + low;
    }

    // Where `numel` elements lie one after the other; -1 if they are in several parts.
    __device__ __forceinline__ long long together(long long begin, int numel) const {
        if (count == 0) return begin;
        const Part* part = of(begin);
        const long long skipped = begin - part->to;
        return skipped + numel <= part->numel ? part->from + skipped : -1;
    }

    // Call `with(group, k, place, offset)` for those of a block's first `present` elements that the thread holds, part by
    // part: `place` in the buffer is that of the thread's first element, were it in the part.
    template <int MEMBERS, typename With>
    __device__ __forceinline__ void each(const Team<MEMBERS>& team, long long begin, int present,
                                         const With& with) const {
#pragma unroll 1
        for (const Part* part = of(begin); part < first + count && part->to < begin + present; ++part) {
            const long long start = part->to - begin;
            const int low = static_cast<int>(max(0ll, start)) - team.first;
            const int high = static_cast<int>(min(static_cast<long long>(present), start + part->numel)) - team.first;
            const long long place = part->from - start + team.first;
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) {
                    const int offset = group * Team<MEMBERS>::STRIDE + k;
                    if (offset >= low && offset < high) with(group, k, place, offset);
                }
            }
        }
    }
};

// Ask for the elements [begin, begin + present); nothing is waited for until a value is used.
template <typename T, int MEMBERS>
__device__ __forceinline__ Raw<T> fetch(const Team<MEMBERS>& team, const T* buffer, const Parts& parts, long long begin,
                                        int present) {
    const long long place = parts.together(begin, present);
    if (place >= 0) return fetch(team, buffer + place, present);
    Raw<T> raw = {};
    parts.each(team, begin, present,
               [&](int group, int k, long long place, int offset) {
                   raw.group[group].lane[k] = (buffer + place)[offset];
               });
    return raw;
}

// Write the elements [begin, begin + present).
template <typename T, int MEMBERS>
__device__ __forceinline__ void store(const Team<MEMBERS>& team, const Tile& tile, T* buffer, const Parts& parts,
                                      long long begin, int present) {
    const long long place = parts.together(begin, present);
    if (place >= 0) return store(team, tile, buffer + place, present);
    parts.each(team, begin, present,
               [&](int group, int k, long long place, int offset) {
                   (buffer + place)[offset] = from_float<T>(tile.value[group][k]);
               });
}
