// SPDX-License-Identifier: Apache-2.0
// A flat buffer of any dtype that the kernels know.
#pragma once

#include "team.cuh"

struct Values {
    const void* first;
    long long dtype;
    long long numel;
    double scale;

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
        load(team, static_cast<const T*>(first) + begin, present, static_cast<float>(scale), tile);
    }
};
