// SPDX-License-Identifier: Apache-2.0
// left right^T for stacks of factors, written or subtracted from matrices; and matrices times factors. In float32
// whatever the matrix units are allowed to do: ranks must agree on every bit, and a residual must have what the product
// left out.
#pragma once

#include "columns.cuh"
#include "strip.cuh"

constexpr int PANEL = 32;                    // columns of the factors in shared memory at a time
constexpr int TILE_ROWS = 64;
constexpr int TILE_COLS = 128;
static_assert(PANEL == LANES, "a warp clears a row of a panel");
constexpr int EACH_ROWS = TILE_ROWS / MAX_WARPS;
constexpr int EACH_COLS = TILE_COLS / LANES;
constexpr int ROWS_TOGETHER = 4;             // of a thread, whose old elements are under way at once
constexpr int FEW_COLUMNS = 4;               // of factors that need no panel

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

// One of several matrices of any shapes: its first element in the buffer and among all that are stacked, the first row
// of its left and of its right factor among all of them, the first CUDA block that has a tile and that has rows of it.
struct Matrix {
    long long place;
    long long kept;
    long long rows;
    long long cols;
    long long left;
    long long right;
    long long first_tile;
    long long first_rows;
};

// The last matrix that begins with this CUDA block or before it.
template <bool TILES>
__device__ __forceinline__ Matrix matrix_of_block(const Matrix* table, long long count) {
    long long low = 0;
    long long high = count - 1;
    while (low < high) {
        const long long middle = (low + high + 1) / 2;
        const long long first = TILES ? table[middle].first_tile : table[middle].first_rows;
        if (first <= blockIdx.x) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return table[low];
}

// The part of a matrix that a CUDA block has. Each warp has every MAX_WARPS-th of its rows, each lane every LANES-th of
// its columns: accesses of a warp are contiguous.
struct MatrixPart {
    long long matrix;
    long long first_row;
    long long first_col;
    int rows;
    int cols;
    int warp;
    int lane;

    __device__ __forceinline__ MatrixPart(long long all_rows, long long all_cols, long long block)
        : warp(static_cast<int>(threadIdx.x) / LANES), lane(static_cast<int>(threadIdx.x) % LANES) {
        const long long down = (all_rows + TILE_ROWS - 1) / TILE_ROWS;
        const long long across = (all_cols + TILE_COLS - 1) / TILE_COLS;
        matrix = block / (down * across);
        first_row = block / across % down * TILE_ROWS;
        first_col = block % across * TILE_COLS;
        rows = static_cast<int>(min(all_rows - first_row, static_cast<long long>(TILE_ROWS)));
        cols = static_cast<int>(min(all_cols - first_col, static_cast<long long>(TILE_COLS)));
    }

    __device__ __forceinline__ int row(int i) const { return warp + i * MAX_WARPS; }

    __device__ __forceinline__ int col(int j) const { return lane + j * LANES; }

    __device__ __forceinline__ bool holds(int i, int j) const { return row(i) < rows && col(j) < cols; }
};

// The thread's elements of some rows, the first of them at `lines`.
struct Elements {
    float of[ROWS_TOGETHER][EACH_COLS] = {};

    __device__ __forceinline__ Elements() {}

    __device__ __forceinline__ Elements(const MatrixPart& part, int begin, const float* lines, long long cols) {
#pragma unroll
        for (int i = 0; i < ROWS_TOGETHER; ++i) {
            const float* line = lines + (begin + i) * MAX_WARPS * cols;
#pragma unroll
            for (int j = 0; j < EACH_COLS; ++j) {
                if (part.holds(begin + i, j)) of[i][j] = line[j * LANES];
            }
        }
    }
};

// A row of a factor of at most FEW_COLUMNS columns.
struct FactorRow {
    float of[FEW_COLUMNS];

    __device__ __forceinline__ FactorRow(const float* at, int columns, bool whole) : of{} {
        if (whole) {
            const auto all = *reinterpret_cast<const Vector<float, FEW_COLUMNS>*>(at);
#pragma unroll
            for (int k = 0; k < FEW_COLUMNS; ++k) of[k] = all.lane[k];
            return;
        }
#pragma unroll
        for (int k = 0; k < FEW_COLUMNS; ++k) {
            if (k < columns) of[k] = at[k];
        }
    }

    __device__ __forceinline__ float times(const FactorRow& other, int columns) const {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < FEW_COLUMNS; ++k) {
            if (k < columns) sum = __fmaf_rn(of[k], other.of[k], sum);
        }
        return sum;
    }
};

// With so few columns all of a thread's factors fit into its registers: no panel, no barrier, and what is read of the
// matrices leaves together with the factors.
template <typename Combine>
__device__ __forceinline__ void multiply_few(const MatrixPart& part, const float* left, const float* right,
                                             long long cols, int columns, float* lines) {
    const bool whole =
        columns == FEW_COLUMNS && misalignment<FEW_COLUMNS>(left) == 0 && misalignment<FEW_COLUMNS>(right) == 0;
    const auto right_row = [&](int j) {
        return FactorRow(right + min(part.col(j), part.cols - 1) * columns, columns, whole);
    };
    const auto left_row = [&](int i) {
        return FactorRow(left + min(part.row(i), part.rows - 1) * columns, columns, whole);
    };
    static_assert(EACH_COLS == 4 && ROWS_TOGETHER == 4, "of which there are as many in the lists");
    const FactorRow rights[] = {right_row(0), right_row(1), right_row(2), right_row(3)};
#pragma unroll 1
    for (int begin = 0; begin < EACH_ROWS; begin += ROWS_TOGETHER) {
        const auto old = Combine::READS ? Elements(part, begin, lines, cols) : Elements{};
        const FactorRow lefts[] = {left_row(begin), left_row(begin + 1), left_row(begin + 2), left_row(begin + 3)};
#pragma unroll
        for (int i = 0; i < ROWS_TOGETHER; ++i) {
            float* line = lines + (begin + i) * MAX_WARPS * cols;
#pragma unroll
            for (int j = 0; j < EACH_COLS; ++j) {
                const float product = lefts[i].times(rights[j], columns);
                if (part.holds(begin + i, j)) line[j * LANES] = Combine{}(old.of[i][j], product);
            }
        }
    }
}

// Zero the rows of a panel from `first` on: they do not exist, and are multiplied like the others.
template <int ROWS>
__device__ __forceinline__ void clear_from(float (&panel)[ROWS][PANEL + 1], int first) {
    for (int row = first + static_cast<int>(threadIdx.x) / LANES; row < ROWS; row += MAX_WARPS) {
        panel[row][threadIdx.x % LANES] = 0.0f;
    }
}

template <typename Combine>
__device__ __forceinline__ void multiply(const float* left, const float* right, long long rows, long long cols,
                                         long long rank, float* matrices, long long block) {
    __shared__ float left_panel[TILE_ROWS][PANEL + 1];   // an odd number of elements apart: different banks
    __shared__ float right_panel[TILE_COLS][PANEL + 1];
    const MatrixPart part(rows, cols, block);
    left += (part.matrix * rows + part.first_row) * rank;
    right += (part.matrix * cols + part.first_col) * rank;
    float* lines = matrices + (part.matrix * rows + part.first_row + part.warp) * cols + part.first_col + part.lane;
    const int stride = static_cast<int>(rank);
    if (stride <= FEW_COLUMNS) return multiply_few<Combine>(part, left, right, cols, stride, lines);
    clear_from(left_panel, part.rows);
    clear_from(right_panel, part.cols);
    float sums[EACH_ROWS][EACH_COLS] = {};
    for (int left_over = stride; left_over > 0; left_over -= PANEL, left += PANEL, right += PANEL) {
        const int width = min(left_over, PANEL);
        __syncthreads();   // the last panels' readers are done
        const Columns columns(width);
        for_each(
            columns, part.rows, [&](int row, int k) { return left[row * stride + k]; },
            [&](int row, int k, float value) { left_panel[row][k] = value; });
        for_each(
            columns, part.cols, [&](int row, int k) { return right[row * stride + k]; },
            [&](int row, int k, float value) { right_panel[row][k] = value; });
        __syncthreads();
        for (int k = 0; k < width; ++k) {
#pragma unroll
            for (int i = 0; i < EACH_ROWS; ++i) {
#pragma unroll
                for (int j = 0; j < EACH_COLS; ++j) {
                    sums[i][j] = __fmaf_rn(left_panel[part.row(i)][k], right_panel[part.col(j)][k], sums[i][j]);
                }
            }
        }
    }
#pragma unroll
    for (int begin = 0; begin < EACH_ROWS; begin += ROWS_TOGETHER) {
        const auto old = Combine::READS ? Elements(part, begin, lines, cols) : Elements{};
#pragma unroll
        for (int i = 0; i < ROWS_TOGETHER; ++i) {
            float* line = lines + (begin + i) * MAX_WARPS * cols;
#pragma unroll
            for (int j = 0; j < EACH_COLS; ++j) {
                if (part.holds(begin + i, j)) line[j * LANES] = Combine{}(old.of[i][j], sums[begin + i][j]);
            }
        }
    }
}

// lowrank_*: one CUDA block of 256 threads per tile of each matrix [rows, cols]; left [rows, rank], right [cols, rank].

extern "C" __global__ void lowrank_decode(const float* left, const float* right, long long rows, long long cols,
                                          long long rank, float* matrices) {
    multiply<Write>(left, right, rows, cols, rank, matrices, blockIdx.x);
}

extern "C" __global__ void lowrank_subtract(const float* left, const float* right, long long rows, long long cols,
                                            long long rank, float* matrices) {
    multiply<Subtract>(left, right, rows, cols, rank, matrices, blockIdx.x);
}

// lowrank_*_all: the same for all matrices of a table, in the buffer or stacked.

extern "C" __global__ void lowrank_decode_all(const Matrix* table, long long count, const float* left,
                                              const float* right, long long rank, float* buffer) {
    const Matrix one = matrix_of_block<true>(table, count);
    multiply<Write>(left + one.left * rank, right + one.right * rank, one.rows, one.cols, rank, buffer + one.place,
                    blockIdx.x - one.first_tile);
}

extern "C" __global__ void lowrank_subtract_all(const Matrix* table, long long count, const float* left,
                                                const float* right, long long rank, float* stacked) {
    const Matrix one = matrix_of_block<true>(table, count);
    multiply<Subtract>(left + one.left * rank, right + one.right * rank, one.rows, one.cols, rank, stacked + one.kept,
                       blockIdx.x - one.first_tile);
}

constexpr int PROJECT_WARPS = 4;
constexpr int PROJECT_ROWS = LANES / FEW_COLUMNS;   // of a CUDA block: in the end each lane has one of their elements

// A value of each lane, the sum of `value[lane]` over the warp. In each step a lane passes on half of what it has.
__device__ __forceinline__ float sum_for_lane(float (&value)[LANES]) {
#pragma unroll
    for (int step = 1; 1 << step <= LANES; ++step) {
        const int half = LANES >> step;
        const bool upper = (lane_of_thread() & half) != 0;
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
            if (i >= half) break;
            const float passed = upper ? value[i] : value[i + half];
            const float kept = upper ? value[i + half] : value[i];
            value[i] = __fadd_rn(kept, __shfl_xor_sync(0xFFFFFFFFu, passed, half));
        }
    }
    return value[0];
}

// A matrix as it is.
struct Given {
    const float* lines;

    __device__ __forceinline__ float element(long long at, bool) const { return load_streaming(lines + at); }
};

// A matrix made of a gradient and its residual (null: none), and kept.
struct Filled {
    const float* values;
    const float* old;
    float* lines;
    float factor;

    __device__ __forceinline__ float element(long long at, bool real) const {
        const float value = load_streaming(values + at);
        const float made = old == nullptr ? __fmul_rn(value, factor) : __fmaf_rn(value, factor, load_streaming(old + at));
        if (real) lines[at] = made;
        return made;
    }
};

// out [PROJECT_ROWS, rank] = `present` rows of a matrix times factors [cols, rank].
template <typename Lines>
__device__ __forceinline__ void project(const Lines& lines, int present, long long cols, const float* factors,
                                        int columns, float* out) {
    __shared__ float of_warp[PROJECT_WARPS][LANES];
    const bool whole = columns == FEW_COLUMNS && misalignment<FEW_COLUMNS>(factors) == 0;
    float sums[LANES] = {};
#pragma unroll 2
    for (long long col = threadIdx.x; col < cols; col += PROJECT_WARPS * LANES) {
        float element[PROJECT_ROWS];
#pragma unroll
        for (int i = 0; i < PROJECT_ROWS; ++i) {   // there may be fewer rows: the last one again, and nobody keeps it
            element[i] = lines.element(min(i, present - 1) * cols + col, i < present);
        }
        const FactorRow factor(factors + col * columns, columns, whole);
#pragma unroll
        for (int i = 0; i < LANES; ++i) {
            sums[i] = __fmaf_rn(element[i / FEW_COLUMNS], factor.of[i % FEW_COLUMNS], sums[i]);
        }
    }
    of_warp[warp_of_thread()][lane_of_thread()] = sum_for_lane(sums);
    __syncthreads();
    const int row = lane_of_thread() / FEW_COLUMNS;
    const int column = lane_of_thread() % FEW_COLUMNS;
    if (warp_of_thread() != 0 || row >= present || column >= columns) return;
    float sum = of_warp[0][lane_of_thread()];
    for (int warp = 1; warp < PROJECT_WARPS; ++warp) sum = __fadd_rn(sum, of_warp[warp][lane_of_thread()]);
    out[row * columns + column] = sum;
}

// lowrank_project: out [rows, rank] = matrix [rows, cols] times right [cols, rank] for each matrix, rank at most
// FEW_COLUMNS. One CUDA block of 128 threads for PROJECT_ROWS rows of a matrix, which is read once.
extern "C" __global__ void lowrank_project(const float* matrices, const float* right, long long rows, long long cols,
                                           long long rank, float* out) {
    const long long blocks = (rows + PROJECT_ROWS - 1) / PROJECT_ROWS;
    const long long matrix = blockIdx.x / blocks;
    const long long first = blockIdx.x % blocks * PROJECT_ROWS;
    const int present = static_cast<int>(min(rows - first, static_cast<long long>(PROJECT_ROWS)));
    project(Given{matrices + (matrix * rows + first) * cols}, present, cols, right + matrix * cols * rank,
            static_cast<int>(rank), out + (matrix * rows + first) * rank);
}

// lowrank_begin: for all matrices of a table stacked = factor * buffer + old (null: none), and left = that times right.
// factor_at: where the factor is; null for `factor`.
extern "C" __global__ void lowrank_begin(const Matrix* table, long long count, const float* buffer, const float* old,
                                         const float* factor_at, double factor, const float* right, long long rank,
                                         float* left, float* stacked) {
    const Matrix one = matrix_of_block<false>(table, count);
    const long long first = (blockIdx.x - one.first_rows) * PROJECT_ROWS;
    const int present = static_cast<int>(min(one.rows - first, static_cast<long long>(PROJECT_ROWS)));
    const long long at = one.kept + first * one.cols;
    const Filled lines{buffer + one.place + first * one.cols, old == nullptr ? old : old + at, stacked + at,
                       factor_at == nullptr ? static_cast<float>(factor) : *factor_at};
    project(lines, present, one.cols, right + one.right * rank, static_cast<int>(rank), left + (one.left + first) * rank);
}
