// SPDX-License-Identifier: Apache-2.0
// Matrices of few columns, row by row: where an element is without a division, and many of them under way at once.
#pragma once

// Counts elements as if rows had the next power of two of columns; those behind the last column do not exist.
struct Columns {
    int count;
    int shift = 0;

    __device__ __forceinline__ explicit Columns(int count) : count(count) {
        while (1 << shift < count) ++shift;
    }

    __device__ __forceinline__ int row(int i) const { return i >> shift; }
    __device__ __forceinline__ int column(int i) const { return i & ((1 << shift) - 1); }
    __device__ __forceinline__ int end(int rows) const { return rows << shift; }
};

// `use(row, column, read(row, column))` for all elements of `rows` rows, shared out among the threads of a CUDA block.
// The reads of a batch leave before the first is waited for.
template <typename Read, typename Use>
__device__ __forceinline__ void for_each(const Columns& columns, int rows, const Read& read, const Use& use) {
    constexpr int BATCH = 8;
    const int stride = static_cast<int>(blockDim.x);
    const int end = columns.end(rows);
    for (int first = threadIdx.x; first < end; first += BATCH * stride) {
        decltype(read(0, 0)) batch[BATCH] = {};
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int i = first + k * stride;
            if (i < end && columns.column(i) < columns.count) batch[k] = read(columns.row(i), columns.column(i));
        }
#pragma unroll
        for (int k = 0; k < BATCH; ++k) {
            const int i = first + k * stride;
            if (i < end && columns.column(i) < columns.count) use(columns.row(i), columns.column(i), batch[k]);
        }
    }
}
