// SPDX-License-Identifier: Apache-2.0
// Products of matrices with few columns, for PowerSGD: stacks of matrices [count, rows, cols], left factors
// [count, rows, r], right factors [count, cols, r]; and the same for matrices that lie anywhere in a buffer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.hpp"
#include "vectors.hpp"

namespace COMMOPT_TARGET {

constexpr std::int64_t AT_ONCE = 4;                 // columns of a factor
constexpr std::int64_t SPREAD_FROM = 1 << 17;       // elements that are worth a thread
constexpr std::int64_t CACHED_NUMEL = 1 << 18;      // what a core's own cache holds twice
constexpr std::int64_t CACHED_SUMS = 4096;          // of products with columns: in the first cache beside the rows
constexpr std::int64_t MOST_SUMS = 1 << 15;         // the same in the second
constexpr std::int64_t AHEAD = 256;                 // elements to fetch before they are needed
constexpr std::int64_t LEAST_COLS = 256;            // of a block: whole cache lines

// The factor's columns one after the other: [r, rows].
inline std::vector<float> transposed(const float* factor, std::int64_t rows, std::int64_t r) {
    std::vector<float> turned(static_cast<std::size_t>(rows * r));
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t k = 0; k < r; ++k) turned[k * rows + row] = factor[row * r + k];
    }
    return turned;
}

// Threads for one matrix of so many elements.
inline std::int64_t threads_for(std::int64_t numel, std::int64_t threads) {
    return std::clamp<std::int64_t>(numel / SPREAD_FROM, 1, threads);
}

// Rows of a matrix that are there.
struct AsItIs {
    Floats operator()(float* row, std::int64_t at) const { return load(row + at); }
    float one(float* row, std::int64_t at) const { return row[at]; }
    void fetch(const float* row, std::int64_t at) const { prefetch(row + at); }
};

// Rows that are made where they are: by * row + remains * old.
struct Mixed {
    std::ptrdiff_t old;  // from a row to that of the old residual
    float by, remains;

    Floats operator()(float* row, std::int64_t at) const {
        const Floats values = load(row + at) * by + load(row + old + at) * remains;
        store(row + at, values);
        return values;
    }
    float one(float* row, std::int64_t at) const { return row[at] = row[at] * by + row[old + at] * remains; }
    void fetch(const float* row, std::int64_t at) const {
        prefetch(row + at);
        prefetch(row + old + at);
    }
};

// The same without an old residual.
struct Scaled {
    float by;

    Floats operator()(float* row, std::int64_t at) const {
        const Floats values = load(row + at) * by;
        store(row + at, values);
        return values;
    }
    float one(float* row, std::int64_t at) const { return row[at] *= by; }
    void fetch(const float* row, std::int64_t at) const { prefetch(row + at); }
};

// out[0..K) = products of a row, as `read` finds or makes it, with K columns of a factor.
template <int K, typename Read>
inline void row_products(float* row, std::int64_t cols, const float* factor, float* out, const Read& read) {
    Floats sums[K] = {};
    std::int64_t col = 0;
    for (; col + LANES <= cols; col += LANES) {
        read.fetch(row, col + AHEAD);
        const Floats values = read(row, col);
        for (int k = 0; k < K; ++k) sums[k] += values * load(factor + k * cols + col);
    }
    for (int k = 0; k < K; ++k) out[k] = sum(sums[k]);
    for (; col < cols; ++col) {
        const float value = read.one(row, col);
        for (int k = 0; k < K; ++k) out[k] += value * factor[k * cols + col];
    }
}

// The same with all columns of the factor.
template <typename Read>
inline void all_row_products(float* row, std::int64_t cols, const float* factor, float* out, std::int64_t r,
                             const Read& read) {
    std::int64_t k = std::min(r, AT_ONCE);
    if (k == 4) row_products<4>(row, cols, factor, out, read);
    if (k == 3) row_products<3>(row, cols, factor, out, read);
    if (k == 2) row_products<2>(row, cols, factor, out, read);
    if (k == 1) row_products<1>(row, cols, factor, out, read);
    const AsItIs again;
    for (; k + AT_ONCE <= r; k += AT_ONCE) row_products<4>(row, cols, factor + k * cols, out + k, again);
    for (; k < r; ++k) row_products<1>(row, cols, factor + k * cols, out + k, again);
}

// out = M right for a matrix M.
template <typename Read>
inline void project(float* matrix, const float* right, float* out, std::int64_t rows, std::int64_t cols,
                    std::int64_t r, std::int64_t threads, const Read& read) {
    const std::vector<float> columns = transposed(right, cols, r);
    spread(rows, 1, threads_for(rows * cols, threads), [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t row = first; row < last; ++row) {
            all_row_products(matrix + row * cols, cols, columns.data(), out + row * r, r, read);
        }
    });
}

inline void lowrank_project(float* matrices, const float* right, float* out, std::int64_t count, std::int64_t rows,
                            std::int64_t cols, std::int64_t r, std::int64_t threads) {
    for (; count > 0; --count, matrices += rows * cols, right += cols * r, out += rows * r) {
        project(matrices, right, out, rows, cols, r, threads, AsItIs{});
    }
}

// values = factor * values + decay * old (old may be null), in place; left = M right for each matrix M of values.
inline void lowrank_begin(float* values, const float* old, double factor, double decay, const Matrix* matrices,
                          std::int64_t count, const float* right, float* left, std::int64_t r, std::int64_t threads) {
    const float by = static_cast<float>(factor), remains = static_cast<float>(decay);
    for (const Matrix* each = matrices; each != matrices + count; ++each) {
        const auto with = [&](const auto& read) {
            project(values + each->place, right + each->right * r, left + each->left * r, each->rows, each->cols, r,
                    threads, read);
        };
        if (old == nullptr) {
            with(Scaled{by});
        } else {
            with(Mixed{(old + each->kept) - (values + each->place), by, remains});
        }
    }
}

// sums[k, :] += products of ROWS rows with K columns of the left factor, over `cols` columns.
template <int ROWS, int K>
inline void add_column_products(const float* row, std::int64_t stride, std::int64_t cols, const float* left,
                                std::int64_t r, float* sums) {
    Floats by[ROWS][K];
    for (int i = 0; i < ROWS; ++i) {
        for (int k = 0; k < K; ++k) by[i][k] = all(left[i * r + k]);
    }
    std::int64_t col = 0;
    for (; col + LANES <= cols; col += LANES) {
        Floats values[ROWS];
        for (int i = 0; i < ROWS; ++i) {
            prefetch(row + i * stride + col + AHEAD);
            values[i] = load(row + i * stride + col);
        }
        for (int k = 0; k < K; ++k) {
            Floats total = load(sums + k * cols + col);
            for (int i = 0; i < ROWS; ++i) total += values[i] * by[i][k];
            store(sums + k * cols + col, total);
        }
    }
    for (; col < cols; ++col) {
        for (int k = 0; k < K; ++k) {
            for (int i = 0; i < ROWS; ++i) sums[k * cols + col] += row[i * stride + col] * left[i * r + k];
        }
    }
}

enum class Store { set, add, subtract };

// A row of a product with K columns of the left factor: put there, added or subtracted, k = 0 .. K-1.
template <Store HOW, int K>
inline void write_products(float* row, std::int64_t cols, const float* left, const float* columns, std::int64_t apart) {
    Floats by[K];
    for (int k = 0; k < K; ++k) by[k] = all(left[k]);
    std::int64_t col = 0;
    for (; col + LANES <= cols; col += LANES) {
        Floats total = HOW == Store::set ? Floats{} : load(row + col);
        for (int k = 0; k < K; ++k) {
            const Floats product = by[k] * load(columns + k * apart + col);
            total = HOW == Store::subtract ? total - product : HOW == Store::set && k == 0 ? product : total + product;
        }
        store(row + col, total);
    }
    for (; col < cols; ++col) {
        float& total = row[col];
        for (int k = 0; k < K; ++k) {
            const float product = left[k] * columns[k * apart + col];
            total = HOW == Store::subtract ? total - product : HOW == Store::set && k == 0 ? product : total + product;
        }
    }
}

template <int ROWS>
inline void add_all_column_products(const float* row, std::int64_t stride, std::int64_t cols, const float* left,
                                    std::int64_t r, float* sums) {
    std::int64_t k = 0;
    for (; k + AT_ONCE <= r; k += AT_ONCE) {
        add_column_products<ROWS, 4>(row, stride, cols, left + k, r, sums + k * cols);
    }
    if (r - k == 3) add_column_products<ROWS, 3>(row, stride, cols, left + k, r, sums + k * cols);
    if (r - k == 2) add_column_products<ROWS, 2>(row, stride, cols, left + k, r, sums + k * cols);
    if (r - k == 1) add_column_products<ROWS, 1>(row, stride, cols, left + k, r, sums + k * cols);
}

// Rows of a product with all columns of the left factor.
template <Store FIRST, Store THEN>
inline void write_rows(float* row, std::int64_t rows, std::int64_t stride, std::int64_t cols, const float* left,
                       std::int64_t r, const float* columns, std::int64_t apart) {
    for (; rows > 0; --rows, row += stride, left += r) {
        std::int64_t k = r >= AT_ONCE ? AT_ONCE : 1;
        if (k == AT_ONCE) write_products<FIRST, AT_ONCE>(row, cols, left, columns, apart);
        if (k == 1) write_products<FIRST, 1>(row, cols, left, columns, apart);
        for (; k + AT_ONCE <= r; k += AT_ONCE) {
            write_products<THEN, AT_ONCE>(row, cols, left + k, columns + k * apart, apart);
        }
        for (; k < r; ++k) write_products<THEN, 1>(row, cols, left + k, columns + k * apart, apart);
    }
}

// right = M^T left for a matrix M, by `block` columns at once, with which `then` may go on.
template <typename Then>
inline void project_back(const float* matrix, const float* left, float* right, std::int64_t rows, std::int64_t cols,
                         std::int64_t r, std::int64_t threads, std::int64_t block, const Then& then) {
    spread(cols, LEAST_COLS, threads_for(rows * cols, threads), [&](std::int64_t first, std::int64_t last) {
        std::vector<float> sums(static_cast<std::size_t>(std::min(block, last - first) * r));
        for (std::int64_t begin = first; begin < last; begin += block) {
            const std::int64_t width = std::min(block, last - begin);
            std::fill(sums.begin(), sums.end(), 0.0f);
            const float* corner = matrix + begin;
            std::int64_t row = 0;
            for (; width * r > CACHED_SUMS && row + 3 <= rows; row += 3) {  // else one memory stream is quicker
                add_all_column_products<3>(corner + row * cols, cols, width, left + row * r, r, sums.data());
            }
            for (; row < rows; ++row) {
                add_all_column_products<1>(corner + row * cols, cols, width, left + row * r, r, sums.data());
            }
            then(begin, width, sums.data());
            for (std::int64_t col = 0; col < width; ++col) {
                for (std::int64_t k = 0; k < r; ++k) right[(begin + col) * r + k] = sums[k * width + col];
            }
        }
    });
}

// right = M^T left, then M -= left right^T.
inline void lowrank_refresh(float* matrices, const float* left, float* right, std::int64_t count, std::int64_t rows,
                            std::int64_t cols, std::int64_t r, std::int64_t threads) {
    const std::int64_t fitting = CACHED_NUMEL / std::max(rows, std::int64_t{1}) / LEAST_COLS * LEAST_COLS;
    const std::int64_t block = std::max(fitting, LEAST_COLS);  // a cache still holds them then
    for (; count > 0; --count, matrices += rows * cols, left += rows * r, right += cols * r) {
        project_back(matrices, left, right, rows, cols, r, threads, block,
                     [&](std::int64_t begin, std::int64_t width, const float* columns) {
                         write_rows<Store::subtract, Store::subtract>(matrices + begin, rows, cols, width, left, r,
                                                                      columns, width);
                     });
    }
}

// right = M^T left for each matrix M of values.
inline void lowrank_back(const float* values, const Matrix* matrices, std::int64_t count, const float* left,
                         float* right, std::int64_t r, std::int64_t threads) {
    for (const Matrix* each = matrices; each != matrices + count; ++each) {
        project_back(values + each->place, left + each->left * r, right + each->right * r, each->rows, each->cols, r,
                     threads, std::max(MOST_SUMS / r, LEAST_COLS), [](std::int64_t, std::int64_t, const float*) {});
    }
}

// out = left right^T: products are rounded, then added, k = 0 .. r-1, so that the bits are the same everywhere.
inline void lowrank_decode(const float* left, const float* right, float* out, std::int64_t count, std::int64_t rows,
                           std::int64_t cols, std::int64_t r, std::int64_t threads) {
    for (; count > 0; --count, left += rows * r, right += cols * r, out += rows * cols) {
        const std::vector<float> columns = transposed(right, cols, r);
        spread(rows, 1, threads_for(rows * cols, threads), [&](std::int64_t first, std::int64_t last) {
            write_rows<Store::set, Store::add>(out + first * cols, last - first, cols, cols, left + first * r, r,
                                               columns.data(), cols);
        });
    }
}

// A row of old = M - left sent^T, then of M = left right^T, for K columns of factors.
template <int K, bool STREAMED>
inline void finish_row(float* row, float* old, std::int64_t cols, const float* left, const float* sent,
                       const float* right) {
    Floats by[K];
    for (int k = 0; k < K; ++k) by[k] = all(left[k]);
    std::int64_t col = 0;
    for (; col + LANES <= cols; col += LANES) {
        prefetch(row + col + AHEAD);
        if (!STREAMED) prefetch(old + col + AHEAD);
        Floats rest = load(row + col), total = by[0] * load(right + col);
        rest -= by[0] * load(sent + col);
        for (int k = 1; k < K; ++k) {
            rest -= by[k] * load(sent + k * cols + col);
            total += by[k] * load(right + k * cols + col);
        }
        STREAMED ? stream(old + col, rest) : store(old + col, rest);
        store(row + col, total);
    }
    for (; col < cols; ++col) {
        float rest = row[col] - left[0] * sent[col], total = left[0] * right[col];
        for (int k = 1; k < K; ++k) {
            rest -= left[k] * sent[k * cols + col];
            total += left[k] * right[k * cols + col];
        }
        old[col] = rest;
        row[col] = total;
    }
}

// The same for all columns of factors.
inline void finish_all(float* row, float* old, std::int64_t cols, const float* left, std::int64_t r, const float* sent,
                       const float* right) {
    std::int64_t k = std::min(r, AT_ONCE);
    const bool past_caches = r == 4 && aligned(old);  // the next step reads it
    if (past_caches) finish_row<4, true>(row, old, cols, left, sent, right);
    if (k == 4 && !past_caches) finish_row<4, false>(row, old, cols, left, sent, right);
    if (k == 3) finish_row<3, false>(row, old, cols, left, sent, right);
    if (k == 2) finish_row<2, false>(row, old, cols, left, sent, right);
    if (k == 1) finish_row<1, false>(row, old, cols, left, sent, right);
    for (; k + AT_ONCE <= r; k += AT_ONCE) {
        write_products<Store::subtract, AT_ONCE>(old, cols, left + k, sent + k * cols, cols);
        write_products<Store::add, AT_ONCE>(row, cols, left + k, right + k * cols, cols);
    }
    for (; k < r; ++k) {
        write_products<Store::subtract, 1>(old, cols, left + k, sent + k * cols, cols);
        write_products<Store::add, 1>(row, cols, left + k, right + k * cols, cols);
    }
}

// old = M - left sent^T for each matrix M of values (old may be null), which then becomes left right^T.
inline void lowrank_finish(float* values, float* old, const Matrix* matrices, std::int64_t count, const float* left,
                           const float* sent, const float* right, std::int64_t r, std::int64_t threads) {
    for (const Matrix* each = matrices; each != matrices + count; ++each) {
        const std::int64_t cols = each->cols;
        const float* factor = left + each->left * r;
        float* matrix = values + each->place;
        if (old == nullptr) {
            lowrank_decode(factor, right + each->right * r, matrix, 1, each->rows, cols, r, threads);
            continue;
        }
        const std::vector<float> columns = transposed(right + each->right * r, cols, r);
        const std::vector<float> own = transposed(sent + each->right * r, cols, r);
        float* kept = old + each->kept;
        spread(each->rows, 1, threads_for(each->rows * cols, threads), [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t row = first; row < last; ++row) {
                const std::int64_t at = row * cols;
                finish_all(matrix + at, kept + at, cols, factor + row * r, r, own.data(), columns.data());
            }
            streamed();
        });
    }
}

}  // namespace COMMOPT_TARGET
