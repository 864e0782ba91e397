// SPDX-License-Identifier: Apache-2.0
// left right^T for stacks of factors: written, or subtracted from matrices. In float32 whatever the matrix units are
// allowed to do: ranks must agree on every bit, and a residual must have what the product left out.
#pragma once

#include "columns.cuh"
#include "team.cuh"

constexpr int PANEL = 32;                    // columns of the factors in shared memory at a time
constexpr int TILE_ROWS = 64;
constexpr int TILE_COLS = 128;
static_assert(PANEL == LANES, "a warp clears a row of a panel");
constexpr int EACH_ROWS = TILE_ROWS / MAX_WARPS;
constexpr int EACH_COLS = TILE_COLS / LANES;
constexpr int ROWS_TOGETHER = 4;             // of a thread, whose old elements are under way at once

struct Write {
    static constexpr bool READS = false;

    __device__ __forceinline__ float operator()(float, float product) const { return product; }
};

struct Subtract {
    static constexpr bool READS = true;

    __device__ __forceinline__ float operator()(float element, float product) const {
        return __fsub_rn(element, product);
    }
};

// Zero the rows of a panel from `first` on: they do not exist, and are multiplied like the others.
template <int ROWS>
__device__ __forceinline__ void clear_from(float (&panel)[ROWS][PANEL + 1], int first) {
    for (int row = first + static_cast<int>(threadIdx.x) / LANES; row < ROWS; row += MAX_WARPS) {
        panel[row][threadIdx.x % LANES] = 0.0f;
    }
}

// Each warp has every MAX_WARPS-th row of the tile, each lane every LANES-th column: accesses of a warp are contiguous.
template <typename Combine>
__device__ __forceinline__ void multiply(const float* left, const float* right, long long rows, long long cols,
                                         long long rank, float* matrices) {
    __shared__ float left_panel[TILE_ROWS][PANEL + 1];   // an odd number of elements apart: different banks
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
    const auto holds = [&](int i, int j) { return warp + i * MAX_WARPS < here_rows && lane + j * LANES < here_cols; };
    left += (matrix * rows + first_row) * rank;
    right += (matrix * cols + first_col) * rank;
    const int stride = static_cast<int>(rank);
    clear_from(left_panel, here_rows);
    clear_from(right_panel, here_cols);
    float sums[EACH_ROWS][EACH_COLS] = {};
    for (int left_over = stride; left_over > 0; left_over -= PANEL, left += PANEL, right += PANEL) {
        const int width = min(left_over, PANEL);
        __syncthreads();   // the last panels' readers are done
        const Columns columns(width);
        for_each(
            columns, here_rows, [&](int row, int k) { return left[row * stride + k]; },
            [&](int row, int k, float value) { left_panel[row][k] = value; });
        for_each(
            columns, here_cols, [&](int row, int k) { return right[row * stride + k]; },
            [&](int row, int k, float value) { right_panel[row][k] = value; });
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
    const Combine combine{};
    float* lines = matrices + (matrix * rows + first_row + warp) * cols + first_col + lane;
#pragma unroll
    for (int begin = 0; begin < EACH_ROWS; begin += ROWS_TOGETHER) {
        float old[ROWS_TOGETHER][EACH_COLS] = {};
#pragma unroll
        for (int i = 0; i < ROWS_TOGETHER; ++i) {
            const float* line = lines + (begin + i) * MAX_WARPS * cols;
#pragma unroll
            for (int j = 0; j < EACH_COLS; ++j) {
                if (Combine::READS && holds(begin + i, j)) old[i][j] = line[j * LANES];
            }
        }
#pragma unroll
        for (int i = 0; i < ROWS_TOGETHER; ++i) {
            float* line = lines + (begin + i) * MAX_WARPS * cols;
#pragma unroll
            for (int j = 0; j < EACH_COLS; ++j) {
                if (holds(begin + i, j)) line[j * LANES] = combine(old[i][j], sums[begin + i][j]);
            }
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
