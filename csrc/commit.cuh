// SPDX-License-Identifier: Apache-2.0
// The next residual in place of the last one, where a flag allows it.
#pragma once

#include "strip.cuh"

constexpr int COMMIT_TOGETHER = 4;   // loads of a thread that are under way at once
constexpr int COMMIT_WIDTH = 4;      // elements of each
constexpr int COMMIT_THREADS = 256;
constexpr int COMMIT_NUMEL = COMMIT_THREADS * COMMIT_TOGETHER * COMMIT_WIDTH;   // of a CUDA block

// commit: values = staged if *flag, else as they were. One CUDA block for COMMIT_NUMEL elements.
extern "C" __global__ void commit(const unsigned char* flag, const float* staged, float* values, long long numel) {
    using Some = Vector<float, COMMIT_WIDTH>;
    if (*flag == 0) return;
    const long long begin = static_cast<long long>(blockIdx.x) * COMMIT_NUMEL;
    const bool whole = begin + COMMIT_NUMEL <= numel;
    if (whole && misalignment<COMMIT_WIDTH>(staged) == 0 && misalignment<COMMIT_WIDTH>(values) == 0) {
        Some some[COMMIT_TOGETHER];
        const long long first = begin + static_cast<long long>(threadIdx.x) * COMMIT_WIDTH;
#pragma unroll
        for (int k = 0; k < COMMIT_TOGETHER; ++k) {
            some[k] = *reinterpret_cast<const Some*>(staged + first + k * COMMIT_THREADS * COMMIT_WIDTH);
        }
#pragma unroll
        for (int k = 0; k < COMMIT_TOGETHER; ++k) {
            *reinterpret_cast<Some*>(values + first + k * COMMIT_THREADS * COMMIT_WIDTH) = some[k];
        }
        return;
    }
    const long long end = min(begin + COMMIT_NUMEL, numel);
    for (long long at = begin + threadIdx.x; at < end; at += COMMIT_THREADS) values[at] = staged[at];
}
