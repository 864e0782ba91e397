// SPDX-License-Identifier: Apache-2.0
// Elements of a flat buffer of any dtype that the kernels know.
#pragma once

#include "parts.cuh"

struct Values {
    const void* buffer;
    long long dtype;
    long long numel;
    double scale;
    Parts parts;

    template <int MEMBERS>
    __device__ __forceinline__ void load_block(const Team<MEMBERS>& team, long long begin, int present,
                                               Tile& tile) const {
        switch (dtype) {   // equal in all threads, and decided before the loads, which then leave together
            case FLOAT32: return load_as<float>(team, begin, present, tile);
            case FLOAT16: return load_as<Half>(team, begin, present, tile);
            default: return load_as<Bfloat16>(team, begin, present, tile);
        }
    }

    template <typename T, int MEMBERS>
    __device__ __forceinline__ void load_as(const Team<MEMBERS>& team, long long begin, int present, Tile& tile) const {
        const Raw<T> raw = fetch(team, static_cast<const T*>(buffer), parts, begin, present);
        take(team, raw, present, static_cast<float>(scale), tile);
    }
};
