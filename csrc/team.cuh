// SPDX-License-Identifier: Apache-2.0
// The threads that share one quantization block, the piece of it each holds in registers, and sums over all of it.
#pragma once

#include "dtype.cuh"

constexpr int LANES = 32;
constexpr int WIDTH = 4;                          // neighbours moved by one access
constexpr int GROUPS = 4;                         // such accesses per thread
constexpr int WARP_NUMEL = LANES * WIDTH * GROUPS;
constexpr int MAX_WARPS = 8;                      // of a CUDA block
constexpr int FEW = 4;                            // lanes that hold a short block
constexpr int SHORT_NUMEL = FEW * WIDTH * GROUPS;

// The threads that have a quantization block to themselves: FEW lanes if it is short, else a warp (MEMBERS is LANES) up
// to WARP_NUMEL elements, and a whole CUDA block beyond.
template <int MEMBERS>
struct Team {
    static constexpr int STRIDE = MEMBERS * WIDTH;   // from group to group: the accesses of a team are contiguous
    int warps;
    unsigned int block;   // which quantization block, counted over all rows
    int first;            // the thread's first element in it
    bool idle;            // its lanes have no block, read the last one again, and write nothing

    __device__ __forceinline__ int element(int group) const { return first + group * STRIDE; }

    __device__ __forceinline__ int numel() const { return warps * GROUPS * STRIDE; }
};

// All warps of a CUDA block.
__device__ __forceinline__ Team<LANES> whole_block() { return {MAX_WARPS, blockIdx.x, 0, false}; }

// `blocks`: how many there are. Lanes of the last warp may be left without one, and still take part in what the warp
// does.
template <int MEMBERS>
__device__ __forceinline__ Team<MEMBERS> form_team(long long block_numel, long long blocks) {
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    const int warp = static_cast<int>(threadIdx.x) / LANES;
    const int warps = static_cast<int>(blockDim.x) / LANES;
    if (MEMBERS < LANES) {
        const unsigned int block = (blockIdx.x * warps + warp) * (LANES / MEMBERS) + lane / MEMBERS;
        const unsigned int last = static_cast<unsigned int>(blocks - 1);
        return {1, min(block, last), lane % MEMBERS * WIDTH, block > last};
    }
    if (block_numel <= WARP_NUMEL) return {1, blockIdx.x * warps + warp, lane * WIDTH, false};
    return {warps, blockIdx.x, warp * WARP_NUMEL + lane * WIDTH, false};
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
template <typename Combine, int MEMBERS, typename T>
__device__ __forceinline__ T reduce(const Team<MEMBERS>& team, T value) {
    const Combine combine{};
#pragma unroll
    for (int distance = MEMBERS / 2; distance > 0; distance /= 2) {
        value = combine(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
    }
    if (MEMBERS < LANES || team.warps == 1) return value;
    __shared__ T of_warp[MAX_WARPS];
    __syncthreads();   // the last reduction's readers are done
    if (threadIdx.x % LANES == 0) of_warp[threadIdx.x / LANES] = value;
    __syncthreads();
    value = of_warp[0];
    for (int warp = 1; warp < team.warps; ++warp) value = combine(value, of_warp[warp]);
    return value;
}

// As bit patterns, finite < infinity < NaN: unlike fmaxf, this lets no NaN get lost.
template <int MEMBERS>
__device__ __forceinline__ float absmax(const Team<MEMBERS>& team, const Tile& tile) {
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
template <typename T, int MEMBERS>
__device__ __forceinline__ Raw<T> fetch(const Team<MEMBERS>& team, const T* block, int present) {
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
template <int MEMBERS>
__device__ __forceinline__ void cut(const Team<MEMBERS>& team, int present, Tile& tile) {
    if (present >= team.numel()) return;   // as nearly always
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            if (team.element(group) + k >= present) tile.value[group][k] = 0.0f;
        }
    }
}

// Take the block's first `present` elements times `factor`, the product rounded once.
template <typename T, int MEMBERS>
__device__ __forceinline__ void take(const Team<MEMBERS>& team, const Raw<T>& raw, int present, float factor,
                                     Tile& tile) {
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) tile.value[group][k] = __fmul_rn(raw.value(group, k), factor);
    }
    cut(team, present, tile);
}

// Write the block's first `present` elements.
template <typename T, int MEMBERS>
__device__ __forceinline__ void store(const Team<MEMBERS>& team, const Tile& tile, T* block, int present) {
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
