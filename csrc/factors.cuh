// SPDX-License-Identifier: Apache-2.0
// Orthonormal columns for tall factors [rows, r], r at most MAX_RANK: Cholesky-QR, that is X <- X L^-T with L L^T the
// Gram matrix X^T X and a ridge. Each CUDA block has a slice of the rows of one of the factors in shared memory.
//
// Launch factor_absmax, factor_gram, and factor_solve twice: the second pass takes away what the first leaves of angles
// between columns. Every operation is spelled out and every sum has a fixed order, so equal input gives equal bits.
#pragma once

#include "columns.cuh"
#include "team.cuh"

constexpr int MAX_RANK = 32;
constexpr int FACTOR_THREADS = MAX_WARPS * LANES;
constexpr int SLICE_ROWS = FACTOR_THREADS;   // a thread each

using Line = float[MAX_RANK + 1];   // in shared memory: an odd number, so that different rows are in different banks

// The rows of a factor that this CUDA block has.
struct Slice {
    Columns columns;
    long long factor;
    int rows;
    long long first_element;   // counted over all factors

    __device__ __forceinline__ Slice(long long all_rows, long long rank) : columns(static_cast<int>(rank)) {
        const long long slices = (all_rows + SLICE_ROWS - 1) / SLICE_ROWS;
        factor = blockIdx.x / slices;
        const long long begin = blockIdx.x % slices * SLICE_ROWS;
        rows = static_cast<int>(min(all_rows - begin, static_cast<long long>(SLICE_ROWS)));
        first_element = (factor * all_rows + begin) * rank;
    }

    __device__ __forceinline__ int element(int row, int column) const { return row * columns.count + column; }
};

// factor_absmax: the bits of the largest magnitude in each slice.
extern "C" __global__ void factor_absmax(const float* factors, long long rows, long long rank, unsigned int* largest) {
    const Slice slice(rows, rank);
    const float* source = factors + slice.first_element;
    unsigned int bits = 0;
    for_each(
        slice.columns, slice.rows, [&](int row, int column) { return source[slice.element(row, column)]; },
        [&](int, int, float value) { bits = max(bits, __float_as_uint(value) & 0x7FFFFFFFu); });
    bits = reduce<Largest>(whole_block(), bits);
    if (threadIdx.x == 0) largest[blockIdx.x] = bits;
}

// Sums for SIDE x SIDE pairs of columns: what a thread reads for one column serves SIDE of them.
constexpr int SIDE = 2;

struct Sums {
    float of[SIDE][SIDE];
};

// Compute a sum for each pair of columns and `keep(left, right, sum)`. Several threads share a square if there are
// enough of them: `part(left, right, first, step)` adds up the summands first, first + step, ... for the columns
// left[SIDE] and right[SIDE], and parts are added in order. All threads must call.
template <typename Part, typename Keep>
__device__ __forceinline__ void sum_pairs(const Columns& columns, Sums* shared, const Part& part, const Keep& keep) {
    const Columns along((columns.count + SIDE - 1) / SIDE);
    const int shift = 2 * along.shift;
    const int squares = 1 << shift;
    const int parts = min(FACTOR_THREADS >> shift, LANES);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < squares * parts) {
        int left[SIDE];
        int right[SIDE];
#pragma unroll
        for (int i = 0; i < SIDE; ++i) {   // there may be fewer columns: the last one again, and nobody keeps it
            left[i] = min(along.row(thread & (squares - 1)) * SIDE + i, columns.count - 1);
            right[i] = min(along.column(thread) * SIDE + i, columns.count - 1);
        }
        shared[thread] = part(left, right, thread >> shift, parts);
    }
    __syncthreads();
    for (int i = thread; i < columns.end(columns.count); i += FACTOR_THREADS) {
        const int left = columns.row(i);
        const int right = columns.column(i);
        if (right >= columns.count) continue;
        const Sums* square = shared + along.end(left / SIDE) + right / SIDE;
        float sum = square->of[left % SIDE][right % SIDE];
        for (int at = 1; at < parts; ++at) sum = __fadd_rn(sum, square[at * squares].of[left % SIDE][right % SIDE]);
        keep(left, right, sum);
    }
}

// Write the Gram matrix [rank, rank] of this CUDA block's slice. All threads must call.
__device__ __forceinline__ void write_gram(const Slice& slice, const Line* tile, Sums* shared, float* grams) {
    const int rank = slice.columns.count;
    float* gram = grams + static_cast<long long>(blockIdx.x) * rank * rank;
    __syncthreads();   // the tile is complete
    sum_pairs(
        slice.columns, shared,
        [&](const int(&left)[SIDE], const int(&right)[SIDE], int first, int step) {
            Sums sums = {};
            for (int row = first; row < slice.rows; row += step) {
#pragma unroll
                for (int i = 0; i < SIDE; ++i) {
#pragma unroll
                    for (int j = 0; j < SIDE; ++j) {
                        sums.of[i][j] = __fmaf_rn(tile[row][left[i]], tile[row][right[j]], sums.of[i][j]);
                    }
                }
            }
            return sums;
        },
        [&](int left, int right, float sum) { gram[left * rank + right] = sum; });
}

// What happens to a factor before the first pass: divided by its largest magnitude it can neither overflow nor vanish
// in the Gram matrix, and a little of `initial` keeps directions from getting lost. A factor of zeros has nothing else.
struct Preparation {
    float largest;
    float noise;

    __device__ __forceinline__ float operator()(float value, float initial) const {
        return __fmaf_rn(initial, noise, largest == 0.0f ? 0.0f : __fdiv_rn(value, largest));
    }
};

// factor_gram: writes the factors, prepared, and the Gram matrix of each slice. initial: null for no noise.
extern "C" __global__ void factor_gram(const float* factors, long long rows, long long rank,
                                       const unsigned int* largest, long long slices, const float* initial,
                                       double noise, float* prepared, float* grams) {
    __shared__ Line tile[SLICE_ROWS];
    __shared__ Sums shared[FACTOR_THREADS];
    const Slice slice(rows, rank);
    unsigned int bits = 0;
    for (long long i = threadIdx.x; i < slices; i += blockDim.x) {
        bits = max(bits, largest[slice.factor * slices + i]);
    }
    bits = reduce<Largest>(whole_block(), bits);
    const Preparation prepare{__uint_as_float(bits), static_cast<float>(noise)};
    const float* source = factors + slice.first_element;
    float* target = prepared + slice.first_element;
    struct Given {
        float value;
        float initial;
    };
    for_each(
        slice.columns, slice.rows,
        [&](int row, int column) {
            const int element = slice.element(row, column);
            return Given{source[element], initial == nullptr ? 0.0f : initial[slice.first_element + element]};
        },
        [&](int row, int column, const Given& given) {
            const float value = prepare(given.value, given.initial);
            target[slice.element(row, column)] = value;
            tile[row][column] = value;
        });
    write_gram(slice, tile, shared, grams);
}

// The Cholesky factor of a Gram matrix with a ridge, in shared memory. All threads must call.
struct Triangle {
    Line below[MAX_RANK];   // the diagonal, which is in `root`
    float root[MAX_RANK];

    // Add up the Gram matrices of all slices.
    __device__ __forceinline__ void load(const Columns& columns, const float* grams, int slices, Sums* shared) {
        const int rank = columns.count;
        sum_pairs(
            columns, shared,
            [&](const int(&left)[SIDE], const int(&right)[SIDE], int first, int step) {
                Sums sums = {};
#pragma unroll 4
                for (int slice = first; slice < slices; slice += step) {
                    const float* gram = grams + static_cast<long long>(slice) * rank * rank;
#pragma unroll
                    for (int i = 0; i < SIDE; ++i) {
#pragma unroll
                        for (int j = 0; j < SIDE; ++j) {
                            sums.of[i][j] = __fadd_rn(sums.of[i][j], gram[left[i] * rank + right[j]]);
                        }
                    }
                }
                return sums;
            },
            [&](int left, int right, float sum) { below[left][right] = sum; });
        __syncthreads();
    }

    __device__ __forceinline__ void factorize(const Columns& columns, float ridge_share) {
        const int rank = columns.count;
        float trace = 0.0f;
        for (int i = 0; i < rank; ++i) trace = __fadd_rn(trace, below[i][i]);
        const float ridge = __fmul_rn(trace, ridge_share);
        for (int column = 0; column < rank; ++column) {
            __syncthreads();   // all have read the trace, or the last column has been taken out
            const float pivot = __fadd_rn(below[column][column], ridge);
            // Roundings could make a pivot smaller than the ridge, which exact arithmetic cannot. A NaN stays.
            const float size = __fsqrt_rn(pivot < ridge ? ridge : pivot);
            const float divisor = size == 0.0f ? 1.0f : size;   // zeros stay zeros
            if (threadIdx.x == 0) root[column] = divisor;
            for (int row = column + 1 + threadIdx.x; row < rank; row += blockDim.x) {
                below[row][column] = __fdiv_rn(below[row][column], divisor);
            }
            __syncthreads();
            for (int i = threadIdx.x; i < columns.end(rank); i += blockDim.x) {
                const int row = columns.row(i);
                const int other = columns.column(i);
                if (other > column && row >= other) {
                    below[row][other] = __fmaf_rn(-below[row][column], below[other][column], below[row][other]);
                }
            }
        }   // after the last column nothing is taken out: its barrier was the last one needed
    }

    // x <- x L^-T, for a row x.
    __device__ __forceinline__ void solve(Line& x, int rank) const {
        for (int column = 0; column < rank; ++column) {
            float rest = x[column];
            for (int other = 0; other < column; ++other) rest = __fmaf_rn(-below[column][other], x[other], rest);
            x[column] = __fdiv_rn(rest, root[column]);
        }
    }
};

// factor_solve: X <- X L^-T in place, and the Gram matrix of each slice of what comes out, unless new_grams is null.
// ridge_share: of the trace, what is added to the diagonal.
extern "C" __global__ void factor_solve(float* factors, long long rows, long long rank, const float* grams,
                                        long long slices, double ridge_share, float* new_grams) {
    __shared__ Line tile[SLICE_ROWS];
    __shared__ Sums shared[FACTOR_THREADS];
    __shared__ Triangle triangle;
    const Slice slice(rows, rank);
    const Columns& columns = slice.columns;
    float* target = factors + slice.first_element;
    for_each(
        columns, slice.rows, [&](int row, int column) { return target[slice.element(row, column)]; },
        [&](int row, int column, float value) { tile[row][column] = value; });
    triangle.load(columns, grams + slice.factor * slices * rank * rank, static_cast<int>(slices), shared);
    triangle.factorize(columns, static_cast<float>(ridge_share));
    if (static_cast<int>(threadIdx.x) < slice.rows) triangle.solve(tile[threadIdx.x], columns.count);
    __syncthreads();
    for_each(
        columns, slice.rows, [&](int row, int column) { return tile[row][column]; },
        [&](int row, int column, float value) { target[slice.element(row, column)] = value; });
    if (new_grams != nullptr) write_gram(slice, tile, shared, new_grams);
}
