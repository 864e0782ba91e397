// SPDX-License-Identifier: Apache-2.0
// The kernels, as compiled for one kind of processor: kernels.cpp, once for each. What they do stands beside each.
#pragma once

#include <cstdint>

// Whole rows of a buffer: its first element there and in what is kept, and its first row among all left and all right
// factors.
struct Matrix {
    std::int64_t place, kept, rows, cols, left, right;
};

// Elements to copy: the first one here and there.
struct Part {
    std::int64_t from, to, numel;
};

struct Kernels {
    const char* target;
    void (*lowrank_project)(float* matrices, const float* right, float* out, std::int64_t count,
                            std::int64_t rows, std::int64_t cols, std::int64_t r, std::int64_t threads);
    void (*lowrank_refresh)(float* matrices, const float* left, float* right, std::int64_t count, std::int64_t rows,
                            std::int64_t cols, std::int64_t r, std::int64_t threads);
    void (*lowrank_decode)(const float* left, const float* right, float* out, std::int64_t count, std::int64_t rows,
                           std::int64_t cols, std::int64_t r, std::int64_t threads);
    void (*lowrank_begin)(float* values, const float* old, double factor, double decay, const Matrix* matrices,
                          std::int64_t count, const float* right, float* left, std::int64_t r, std::int64_t threads);
    void (*lowrank_back)(const float* values, const Matrix* matrices, std::int64_t count, const float* left,
                         float* right, std::int64_t r, std::int64_t threads);
    void (*lowrank_finish)(float* values, float* old, const Matrix* matrices, std::int64_t count, const float* left,
                           const float* sent, const float* right, std::int64_t r, std::int64_t threads);
    void (*orthogonalize)(const float* factors, const float* initial, float* out, const std::int64_t* heights,
                          std::int64_t count, std::int64_t r, std::int64_t threads);
    std::int64_t (*pack)(const std::uint16_t* values, std::int64_t numel, std::uint8_t* packed, std::uint8_t* beyond);
    void (*unpack)(const std::uint8_t* packed, const std::uint8_t* beyond, std::int64_t beyond_nbytes,
                   std::int64_t numel, std::uint16_t* values);
    std::int64_t (*pack_difference)(const std::uint16_t* values, const std::uint16_t* base, std::int64_t numel,
                                    std::int64_t mantissa, std::uint8_t* message);
    std::int64_t (*unpack_difference)(const std::uint8_t* message, std::int64_t nbytes, std::int64_t numel,
                                      std::int64_t mantissa, std::uint16_t* values);
    void (*sum_bfloat16)(const std::uint16_t* rows, std::int64_t apart, std::int64_t count, std::int64_t numel,
                         float* total);
    void (*encode)(std::int64_t codec, const void* values, std::int64_t dtype, std::int64_t numel, double scale,
                   std::uint8_t* payload, std::int64_t stride, std::int64_t rows, std::int64_t blocks,
                   std::int64_t block, const float* old, float* fresh, const float* loss_scale, double decay,
                   std::int64_t seed, std::int64_t step, std::int64_t stream, const Part* parts, std::int64_t count,
                   std::int64_t threads);
    void (*recode)(std::int64_t codec, std::uint8_t* payloads, std::int64_t stride, std::int64_t peers,
                   std::uint8_t* payload, std::int64_t blocks, std::int64_t block, std::int64_t numel,
                   const float* old, float* fresh, const float* loss_scale, double decay, std::int64_t seed,
                   std::int64_t step, std::int64_t stream, std::int64_t threads);
    void (*decode)(std::int64_t codec, std::uint8_t* payload, std::int64_t stride, std::int64_t rows,
                   std::int64_t blocks, std::int64_t block, std::int64_t peers, void* values, std::int64_t dtype,
                   std::int64_t numel, const Part* parts, std::int64_t count, std::int64_t threads);
    void (*copy)(const float* from, float* to, const Part* parts, std::int64_t count, std::int64_t threads);
    void (*sparse_select)(const void* values, std::int64_t dtype, std::int64_t numel, double scale,
                          std::uint8_t* payload, std::int64_t stride, std::int64_t rows, std::int64_t chunk_numel,
                          std::int64_t count, std::int64_t value_dtype, const float* old, float* fresh,
                          const float* loss_scale, double decay, std::int64_t threads);
    void (*sparse_scatter)(std::uint8_t* payload, std::int64_t stride, std::int64_t rows, std::int64_t chunk_numel,
                           std::int64_t count, std::int64_t value_dtype, void* values, std::int64_t dtype,
                           std::int64_t numel);
    void (*sparse_sum)(std::uint8_t* payloads, std::int64_t stride, std::int64_t peers, std::int64_t chunk_numel,
                       std::int64_t count, std::int64_t value_dtype, float* total);
};

extern const Kernels baseline_kernels, avx2_kernels;  // the second on x86 alone
