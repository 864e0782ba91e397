// Orthonormal columns for tall factors [rows, r], r at most MAX_RANK: Cholesky-QR, that is X <- X L^-T with L L^T the
// Gram matrix X^T X and a ridge. Each CUDA block has a slice of the rows of one of the factors in shared memory.
//
// Launch factor_absmax, then factor_gram and factor_solve, and these two once more: the second pass takes away what the
// first leaves of angles between columns. Every operation is spelled out and every sum has a fixed order, so equal
// input gives equal bits.
#pragma once

#include "team.cuh"

constexpr int MAX_RANK = 32;
constexpr int SLICE_NUMEL = 8192;
constexpr int FACTOR_THREADS = MAX_WARPS * LANES;

// The rows of a factor that this CUDA block has.
struct Slice {
    long long factor;
    long long begin;   // its first row
    int rows;
    int rank;
    int stride;        // of its rows in shared memory: odd, so that threads at different rows use different banks

    __device__ __forceinline__ Slice(long long all_rows, long long columns)
        : rank(static_cast<int>(columns)), stride(rank | 1) {
        const long long most = SLICE_NUMEL / stride;
        const long long slices = (all_rows + most - 1) / most;
        factor = blockIdx.x / slices;
        begin = blockIdx.x % slices * most;
        rows = static_cast<int>(min(most, all_rows - begin));
    }

    __device__ __forceinline__ long long first_element(long long all_rows) const {
        return (factor * all_rows + begin) * rank;
    }

    __device__ __forceinline__ int numel() const { return rows * rank; }

    __device__ __forceinline__ int place(int element) const { return element / rank * stride + element % rank; }
};

// factor_absmax: the bits of the largest magnitude in each slice.
extern "C" __global__ void factor_absmax(const float* factors, long long rows, long long rank, unsigned int* largest) {
    const Slice slice(rows, rank);
    const float* source = factors + slice.first_element(rows);
    unsigned int bits = 0;
    for (int i = threadIdx.x; i < slice.numel(); i += blockDim.x) {
        bits = max(bits, __float_as_uint(source[i]) & 0x7FFFFFFFu);
    }
    bits = reduce<Largest>(Team{MAX_WARPS, blockIdx.x, 0}, bits);
    if (threadIdx.x == 0) largest[blockIdx.x] = bits;
}

// What the first pass does to a factor beside: divided by its largest magnitude it can neither overflow nor vanish in
// the Gram matrix, and a little of `initial` keeps directions from getting lost. A factor of zeros has nothing else.
struct Preparation {
    float largest;
    const float* initial;   // null: no noise
    float noise;

    __device__ __forceinline__ float operator()(float value, long long element) const {
        const float share = largest == 0.0f ? 0.0f : __fdiv_rn(value, largest);
        return initial == nullptr ? share : __fmaf_rn(initial[element], noise, share);
    }
};

// factor_gram: writes the factors, prepared where `largest` is given, and the Gram matrix [rank, rank] of each slice.
extern "C" __global__ void factor_gram(const float* factors, long long rows, long long rank,
                                       const unsigned int* largest, long long slices, const float* initial,
                                       double noise, float* prepared, float* grams) {
    __shared__ float tile[SLICE_NUMEL];
    __shared__ float sums[MAX_RANK * MAX_RANK];
    const Slice slice(rows, rank);
    const long long first = slice.first_element(rows);
    unsigned int bits = 0;
    if (largest != nullptr) {
        for (long long i = threadIdx.x; i < slices; i += blockDim.x) {
            bits = max(bits, largest[slice.factor * slices + i]);
        }
        bits = reduce<Largest>(Team{MAX_WARPS, blockIdx.x, 0}, bits);
    }
    const Preparation prepare{__uint_as_float(bits), initial, static_cast<float>(noise)};
    for (int i = threadIdx.x; i < slice.numel(); i += blockDim.x) {
        const float value = largest == nullptr ? factors[first + i] : prepare(factors[first + i], first + i);
        prepared[first + i] = value;
        tile[slice.place(i)] = value;
    }
    __syncthreads();
    // Several threads share an inner product if there are enough of them: each takes every parts-th row.
    const int pairs = slice.rank * slice.rank;
    const int parts = max(FACTOR_THREADS / pairs, 1);
    for (int i = threadIdx.x; i < pairs * parts; i += blockDim.x) {
        const int left = i % pairs / slice.rank;
        const int right = i % slice.rank;
        float sum = 0.0f;
        for (int row = i / pairs; row < slice.rows; row += parts) {
            const float* values = tile + row * slice.stride;
            sum = __fmaf_rn(values[left], values[right], sum);
        }
        sums[i] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        float sum = sums[i];
        for (int part = 1; part < parts; ++part) sum = __fadd_rn(sum, sums[part * pairs + i]);
        grams[static_cast<long long>(blockIdx.x) * pairs + i] = sum;
    }
}

// The Cholesky factor of a Gram matrix with a ridge, in shared memory. All threads must call.
struct Triangle {
    float below[MAX_RANK][MAX_RANK + 1];   // the diagonal, which is in `root`
    float root[MAX_RANK];

    // Add up the Gram matrices of all slices.
    __device__ __forceinline__ void load(const float* grams, long long slices, int rank) {
        for (int i = threadIdx.x; i < rank * rank; i += blockDim.x) {
            float sum = 0.0f;
            for (long long slice = 0; slice < slices; ++slice) sum = __fadd_rn(sum, grams[slice * rank * rank + i]);
            below[i / rank][i % rank] = sum;
        }
        __syncthreads();
    }

    __device__ __forceinline__ void factorize(int rank, float ridge_share) {
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
            for (int i = threadIdx.x; i < rank * rank; i += blockDim.x) {
                const int row = i / rank;
                const int other = i % rank;
                if (other > column && row >= other) {
                    below[row][other] = __fmaf_rn(-below[row][column], below[other][column], below[row][other]);
                }
            }
        }
        __syncthreads();
    }

    // x <- x L^-T, for a row x.
    __device__ __forceinline__ void solve(float* x, int rank) const {
        for (int column = 0; column < rank; ++column) {
            float rest = x[column];
            for (int other = 0; other < column; ++other) rest = __fmaf_rn(-below[column][other], x[other], rest);
            x[column] = __fdiv_rn(rest, root[column]);
        }
    }
};

// factor_solve: X <- X L^-T in place. ridge_share: of the trace, what is added to the diagonal.
extern "C" __global__ void factor_solve(float* factors, long long rows, long long rank, const float* grams,
                                        long long slices, double ridge_share) {
    __shared__ float tile[SLICE_NUMEL];
    __shared__ Triangle triangle;
    const Slice slice(rows, rank);
    triangle.load(grams + slice.factor * slices * rank * rank, slices, slice.rank);
    triangle.factorize(slice.rank, static_cast<float>(ridge_share));
    float* target = factors + slice.first_element(rows);
    for (int i = threadIdx.x; i < slice.numel(); i += blockDim.x) tile[slice.place(i)] = target[i];
    __syncthreads();
    for (int row = threadIdx.x; row < slice.rows; row += blockDim.x) {
        triangle.solve(tile + row * slice.stride, slice.rank);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < slice.numel(); i += blockDim.x) target[i] = tile[slice.place(i)];
}
