// SPDX-License-Identifier: Apache-2.0
// Orthonormal columns of factors by Cholesky-QR in float64, with the bits of commopt/kernels/lowrank_reference.py.
//
// All sums are of whole numbers below 2^53, hence exact, in whatever order. What is not exact has one order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "vectors.hpp"

namespace COMMOPT_TARGET {

constexpr int GRID = 20;              // bits of an element beside the largest of its column
constexpr int WORD = 24;              // bits of half a coefficient
constexpr int EXACT = 53;             // bits of a whole number in float64
constexpr double FLOOR = 0x1p-34;     // of a pivot, as a share of its column's square
constexpr std::int64_t STRIP = 256;   // rows at once

class Orthogonalization {
  public:
    Orthogonalization(std::int64_t rows, std::int64_t r)
        : rows_(rows), r_(r), noise_(static_cast<float>(std::sqrt(static_cast<double>(rows)))) {
        mixed_.resize(r * rows);
        grid_.resize(r * rows);
    }

    // Write `out`, which may be `factors`; `initial` may be null.
    void run(const float* factors, const float* initial, float* out) {
        if (!take(factors, initial)) {
            std::fill(out, out + rows_ * r_, std::numeric_limits<float>::quiet_NaN());
            return;
        }
        gram();
        invert();
        multiply(out);
    }

  private:
    // Put columns, with noise, on the grid; return whether all is finite.
    bool take(const float* factors, const float* initial) {
        float largest = 0.0f;
        bool finite = true;
        for (std::int64_t at = 0; at < rows_ * r_; ++at) {
            const float magnitude = std::fabs(factors[at]);
            finite &= magnitude <= std::numeric_limits<float>::max();
            largest = magnitude > largest ? magnitude : largest;
        }
        if (!finite) return false;
        const float share = (largest == 0.0f ? 1.0f : largest * 1e-6f) * noise_;
        for (std::int64_t k = 0; k < r_; ++k) {
            float* mixed = mixed_.data() + k * rows_;
            float high = 0.0f;
            for (std::int64_t row = 0; row < rows_; ++row) {
                float value = factors[row * r_ + k];
                if (initial != nullptr) value += initial[row * r_ + k] * share;
                mixed[row] = value;
                const float magnitude = std::fabs(value);
                high = magnitude > high ? magnitude : high;
            }
            if (!(high <= std::numeric_limits<float>::max())) return false;
            const double by = 0x1p20 / (high == 0.0f ? 1.0 : static_cast<double>(high));
            double* grid = grid_.data() + k * rows_;
            for (std::int64_t row = 0; row < rows_; ++row) {
                // Adding 1.5 * 2^52 leaves no bits below one: rounded to nearest, ties to even.
                const double scaled = static_cast<double>(mixed[row]) * by;
                grid[row] = (scaled + 0x1.8p52) - 0x1.8p52;
            }
        }
        return true;
    }

    void gram() {
        constexpr std::int64_t exact_rows = std::int64_t{1} << (EXACT - 2 * GRID);
        gram_.assign(r_ * r_, 0.0);
        for (std::int64_t first = 0; first < rows_; first += exact_rows) {
            const std::int64_t last = std::min(rows_, first + exact_rows);
            for (std::int64_t i = 0; i < r_; ++i) {
                for (std::int64_t j = i; j < r_; ++j) {
                    const double total = inner(grid_.data() + i * rows_, grid_.data() + j * rows_, first, last);
                    gram_[i * r_ + j] += total;
                    if (i != j) gram_[j * r_ + i] += total;
                }
            }
        }
    }

    static double inner(const double* one, const double* other, std::int64_t first, std::int64_t last) {
        double sums[16] = {};
        std::int64_t at = first;
        for (; at + 16 <= last; at += 16) {
            for (int lane = 0; lane < 16; ++lane) sums[lane] += one[at + lane] * other[at + lane];
        }
        double total = 0.0;
        for (; at < last; ++at) total += one[at] * other[at];
        for (const double part : sums) total += part;
        return total;
    }

    // Elimination in the rows of [G | 1], then the inverse root in two words.
    void invert() {
        const std::int64_t width = 2 * r_;
        std::vector<double> rows(r_ * width, 0.0);
        std::vector<double> floors(r_);
        for (std::int64_t i = 0; i < r_; ++i) {
            for (std::int64_t j = 0; j < r_; ++j) rows[i * width + j] = gram_[i * r_ + j];
            rows[i * width + r_ + i] = 1.0;
            floors[i] = gram_[i * r_ + i] * FLOOR;
        }
        for (std::int64_t place = 0; place < r_; ++place) {
            double* row = rows.data() + place * width;
            double root = std::sqrt(std::max(row[place], floors[place]));
            if (root == 0.0) root = 1.0;
            for (std::int64_t j = place; j < width; ++j) row[j] /= root;
            for (std::int64_t below = place + 1; below < r_; ++below) {
                const double by = row[below];
                double* target = rows.data() + below * width;
                for (std::int64_t j = place; j < width; ++j) target[j] -= by * row[j];
            }
        }
        upper_.assign(r_ * r_, 0.0);
        lower_.assign(r_ * r_, 0.0);
        units_.assign(r_, 0.0);
        for (std::int64_t i = 0; i < r_; ++i) {
            const double* inverse = rows.data() + i * width + r_;
            double largest = 0.0;
            for (std::int64_t j = 0; j < r_; ++j) largest = std::max(largest, std::fabs(inverse[j]));
            int exponent = 0;
            std::frexp(largest, &exponent);
            const double unit = std::ldexp(1.0, exponent - WORD);
            units_[i] = unit;
            for (std::int64_t j = 0; j < r_; ++j) {
                const double scaled = inverse[j] / unit;
                const double whole = std::nearbyint(scaled);
                upper_[i * r_ + j] = whole;
                lower_[i * r_ + j] = std::nearbyint((scaled - whole) * 0x1p24);
            }
        }
    }

    void multiply(float* out) const {
        double high[STRIP], low[STRIP];
        for (std::int64_t first = 0; first < rows_; first += STRIP) {
            const std::int64_t numel = std::min(STRIP, rows_ - first);
            for (std::int64_t i = 0; i < r_; ++i) {
                std::fill(high, high + numel, 0.0);
                std::fill(low, low + numel, 0.0);
                for (std::int64_t j = 0; j <= i; ++j) {  // the inverse is lower triangular
                    const double up = upper_[i * r_ + j], down = lower_[i * r_ + j];
                    const double* grid = grid_.data() + j * rows_ + first;
                    for (std::int64_t at = 0; at < numel; ++at) {
                        high[at] += up * grid[at];
                        low[at] += down * grid[at];
                    }
                }
                for (std::int64_t at = 0; at < numel; ++at) {
                    out[(first + at) * r_ + i] = static_cast<float>((high[at] + low[at] * 0x1p-24) * units_[i]);
                }
            }
        }
    }

    std::int64_t rows_, r_;
    float noise_;
    std::vector<float> mixed_;
    std::vector<double> grid_, gram_, upper_, lower_, units_;
};

// Factors of so many rows each, one after the other: [rows of all, r]. `out` may be `factors`, `initial` may be null.
inline void orthogonalize(const float* factors, const float* initial, float* out, const std::int64_t* heights,
                          std::int64_t count, std::int64_t r, std::int64_t threads) {
    std::vector<std::int64_t> starts(count + 1, 0);
    for (std::int64_t number = 0; number < count; ++number) starts[number + 1] = starts[number] + heights[number] * r;
    spread(count, 1, std::clamp<std::int64_t>(starts[count] / (1 << 15), 1, threads),
           [&](std::int64_t first, std::int64_t last) {
               for (std::int64_t number = first; number < last; ++number) {
                   const std::int64_t at = starts[number];
                   Orthogonalization one(heights[number], r);
                   one.run(factors + at, initial == nullptr ? nullptr : initial + at, out + at);
               }
           });
}

}  // namespace COMMOPT_TARGET
