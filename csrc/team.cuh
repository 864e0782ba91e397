// SPDX-License-Identifier: Apache-2.0
// The threads that share one quantization block, the piece of it each holds in registers, and sums over all of it.
#pragma once

#include "dtype.cuh"

constexpr int LANES = 32;
constexpr int WIDTH = 4;                          // neighbours moved by one access
constexpr int GROUPS = 4;                         // such accesses per thread
constexpr int GROUP_STRIDE = LANES * WIDTH;       // so that the accesses of a warp are contiguous
constexpr int WARP_NUMEL = GROUPS * GROUP_STRIDE;
constexpr int MAX_WARPS = 8;                      // of a CUDA block

// A warp has a quantization block of up to WARP_NUMEL elements to itself; a longer one takes a whole CUDA block.
struct Team {
    int warps;
    unsigned int block;   // which quantization block, counted over all rows
    int first;            // the thread's first element in it

    __device__ __forceinline__ int element(int group) const { return first + group * GROUP_STRIDE; }
};

__device__ __forceinline__ Team form_team(long long block_numel) {
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    const int warp = static_cast<int>(threadIdx.x) / LANES;
    const int warps = static_cast<int>(blockDim.x) / LANES;
    if (block_numel <= WARP_NUMEL) return {1, blockIdx.x * warps + warp, lane * WIDTH};
    return {warps, blockIdx.x, warp * WARP_NUMEL + lane * WIDTH};
}

// What a thread holds of its block; elements that do not exist are +0.
struct Tile {
    float value[GROUPS][WIDTH];
};

struct Sum {
    __device__ __forceinline__ float operator()(float a, float b) const { return __fadd_rn(a, b); }
};

struct Largest {
    __device__ __forceinline__ unsigned int operator()(unsigned int a, unsigned int b) const { return a > b ? a : b; }
};

// Combine a value of every thread of the team; all of them must call and all get the same bits.
template <typename Combine, typename T>
__device__ __forceinline__ T reduce(const Team& team, T value) {
    const Combine combine{};
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        value = combine(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
    }
    if (team.warps == 1) return value;
    __shared__ T of_warp[MAX_WARPS];
    __syncthreads();   // the last reduction's readers are done
    if (threadIdx.x % LANES == 0) of_warp[threadIdx.x / LANES] = value;
    __syncthreads();
    value = of_warp[0];
    for (int warp = 1; warp < team.warps; ++warp) value = combine(value, of_warp[warp]);
    return value;
}

// As bit patterns, finite < infinity < NaN: unlike fmaxf, this lets no NaN get lost.
__device__ __forceinline__ float absmax(const Team& team, const Tile& tile) {
    const Largest largest{};
    unsigned int bits = 0;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            bits = largest(bits, __float_as_uint(tile.value[group][k]) & 0x7FFFFFFFu);
        }
    }
    return __uint_as_float(reduce<Largest>(team, bits));
}

// Whether every group of a block's first `present` elements can move as one vector.
template <typename T>
__device__ __forceinline__ bool vectorizes(const T* block, int present) {
    return misalignment<WIDTH>(block) == 0 && present % WIDTH == 0;
}

// What memory holds of a tile; elements that do not exist are +0.
template <typename T>
struct Raw {
    Vector<T, WIDTH> group[GROUPS];

    __device__ __forceinline__ float value(int at, int k) const { return to_float(group[at].lane[k]); }
};

// Ask for the block's first `present` elements; nothing is waited for until a value is used.
template <typename T>
__device__ __forceinline__ Raw<T> fetch(const Team& team, const T* block, int present) {
    Raw<T> raw = {};
    if (vectorizes(block, present)) {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const int element = team.element(group);
            if (element < present) raw.group[group] = *reinterpret_cast<const Vector<T, WIDTH>*>(block + element);
        }
    } else {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                const int element = team.element(group) + k;
                if (element < present) raw.group[group].lane[k] = block[element];
            }
        }
    }
    return raw;
}

// Forget what lies past the first `present` elements.
__device__ __forceinline__ void cut(const Team& team, int present, Tile& tile) {
    if (present >= team.warps * WARP_NUMEL) return;   // as nearly always
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            if (team.element(group) + k >= present) tile.value[group][k] = 0.0f;
        }
    }
}

// Read the block's first `present` elements times `factor`, the product rounded once.
template <typename T>
__device__ __forceinline__ void load(const Team& team, const T* block, int present, float factor, Tile& tile) {
    const Raw<T> raw = fetch(team, block, present);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) tile.value[group][k] = __fmul_rn(raw.value(group, k), factor);
    }
    cut(team, present, tile);
}

// Write the block's first `present` elements.
template <typename T>
__device__ __forceinline__ void store(const Team& team, const Tile& tile, T* block, int present) {
    if (vectorizes(block, present)) {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const int element = team.element(group);
            Vector<T, WIDTH> values;
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) values.lane[k] = from_float<T>(tile.value[group][k]);
            if (element < present) *reinterpret_cast<Vector<T, WIDTH>*>(block + element) = values;
        }
        return;
    }
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            const int element = team.element(group) + k;
            if (element < present) block[element] = from_float<T>(tile.value[group][k]);
        }
    }
}
