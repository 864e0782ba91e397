// SPDX-License-Identifier: Apache-2.0
// Sums of bfloat16 numbers in float32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace COMMOPT_TARGET {

constexpr std::int64_t SUMMED_AT_ONCE = 2048;  // numbers: all rows' and the sum in the first cache

inline float widened(std::uint16_t value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// total = the sum of `count` rows, `apart` numbers from one to the next, in their order.
inline void sum_bfloat16(const std::uint16_t* rows, std::int64_t apart, std::int64_t count, std::int64_t numel,
                         float* total) {
    for (std::int64_t first = 0; first < numel; first += SUMMED_AT_ONCE) {
        const std::int64_t last = std::min(first + SUMMED_AT_ONCE, numel);
        std::int64_t row = 1;
        if (count > 1) {
            for (std::int64_t at = first; at < last; ++at) total[at] = widened(rows[at]) + widened(rows[apart + at]);
            row = 2;
        } else {
            for (std::int64_t at = first; at < last; ++at) total[at] = widened(rows[at]);
        }
        for (; row < count; ++row) {
            for (std::int64_t at = first; at < last; ++at) total[at] += widened(rows[row * apart + at]);
        }
    }
}

}  // namespace COMMOPT_TARGET
