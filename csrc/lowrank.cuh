// left right^T for stacks of factors: written, or subtracted from matrices. In float32 whatever the matrix units are
// allowed to do: ranks must agree on every bit, and a residual must have what the product left out.
#pragma once

#include "team.cuh"

constexpr int PANEL = 32;                    // columns of the factors in shared memory at a time
constexpr int TILE_ROWS = 64;
constexpr int TILE_COLS = 128;
constexpr int EACH_ROWS = TILE_ROWS / MAX_WARPS;
constexpr int EACH_COLS = TILE_COLS / LANES;

struct Write {
    __device__ __forceinline__ void operator()(float& element, float product) const { element = product; }
};

struct Subtract {
    __device__ __forceinline__ void operator()(float& element, float product) const {
        element = __fsub_rn(element, product);
    }
};

// Copy `count` rows of a panel of `width` columns; rows in shared memory are an odd number of elements apart.
__device__ __forceinline__ void load_panel(const float* factor, long long rank, int count, int width,
                                           float (*panel)[PANEL + 1]) {
    for (int i = threadIdx.x; i < count * width; i += blockDim.x) {
        panel[i / width][i % width] = factor[i / width * rank + i % width];
    }
}

// Each warp has every MAX_WARPS-th row of the tile, each lane every LANES-th column: accesses of a warp are contiguous.
template <typename Store>
__device__ __forceinline__ void multiply(const float* left, const float* right, long long rows, long long cols,
                                         long long rank, float* matrices) {
    __shared__ float left_panel[TILE_ROWS][PANEL + 1];
    __shared__ float right_panel[TILE_COLS][PANEL + 1];
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    const int warp = static_cast<int>(threadIdx.x) / LANES;
    const long long down = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const long long across = (cols + TILE_COLS - 1) / TILE_COLS;
    const long long matrix = blockIdx.x / (down * across);
    const long long first_row = blockIdx.x / across % down * TILE_ROWS;
    const long long first_col = blockIdx.x % across * TILE_COLS;
    const int here_rows = static_cast<int>(min(rows - first_row, static_cast<long long>(TILE_ROWS)));
    const int here_cols = static_cast<int>(min(cols - first_col, static_cast<long long>(TILE_COLS)));
    float sums[EACH_ROWS][EACH_COLS] = {};
    for (long long first = 0; first < rank; first += PANEL) {
        const int width = static_cast<int>(min(rank - first, static_cast<long long>(PANEL)));
        __syncthreads();   // the last panels' readers are done
        load_panel(left + (matrix * rows + first_row) * rank + first, rank, here_rows, width, left_panel);
        load_panel(right + (matrix * cols + first_col) * rank + first, rank, here_cols, width, right_panel);
        __syncthreads();
        for (int k = 0; k < width; ++k) {
#pragma unroll
            for (int i = 0; i < EACH_ROWS; ++i) {
#pragma unroll
                for (int j = 0; j < EACH_COLS; ++j) {
                    sums[i][j] = __fmaf_rn(left_panel[warp + i * MAX_WARPS][k], right_panel[lane + j * LANES][k],
                                           sums[i][j]);
                }
            }
        }
    }
    float* tile = matrices + (matrix * rows + first_row) * cols + first_col;
    const Store store{};
#pragma unroll
    for (int i = 0; i < EACH_ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < EACH_COLS; ++j) {
            const int row = warp + i * MAX_WARPS;
            const int col = lane + j * LANES;
            if (row < here_rows && col < here_cols) store(tile[row * cols + col], sums[i][j]);
        }
    }
}

// lowrank_*: one CUDA block of 256 threads per tile of each matrix [rows, cols]; left [rows, rank], right [cols, rank].

extern "C" __global__ void lowrank_decode(const float* left, const float* right, long long rows, long long cols,
                                          long long rank, float* matrices) {
    multiply<Write>(left, right, rows, cols, rank, matrices);
}

extern "C" __global__ void lowrank_subtract(const float* left, const float* right, long long rows, long long cols,
                                            long long rank, float* matrices) {
    multiply<Subtract>(left, right, rows, cols, rank, matrices);
}
