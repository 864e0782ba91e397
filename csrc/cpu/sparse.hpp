// SPDX-License-Identifier: Apache-2.0
// Sparse rows: the largest elements of each chunk to a row of payload, and back, and the sum of rows. What a row holds
// stands in commopt/kernels/sparse.py. One pass over memory: a sample says above which threshold there are probably
// enough elements, and the choice among those is exact.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

#include "blocks.hpp"
#include "codecs.hpp"
#include "vectors.hpp"

namespace COMMOPT_TARGET {

constexpr std::int64_t INDEX_BLOCK = 65536;     // elements whose index within their block fits into 16 bits
constexpr std::int64_t SAMPLE = 8192;           // elements

struct SparseRow {
    std::uint8_t* begin;
    std::int64_t chunk_numel, count;
    bool wide;  // values are float32, else bfloat16

    std::int64_t blocks() const { return (chunk_numel + INDEX_BLOCK - 1) / INDEX_BLOCK; }
    std::int64_t indices_begin() const { return 4 * blocks(); }
    std::int64_t values_begin() const { return indices_begin() + (2 * count + 3) / 4 * 4; }
    std::int64_t values_end() const { return values_begin() + count * (wide ? 4 : 2); }
    std::int64_t nbytes() const { return (values_end() + 15) / 16 * 16; }

    std::int32_t* ends() const { return reinterpret_cast<std::int32_t*>(begin); }
    std::uint16_t* indices() const { return reinterpret_cast<std::uint16_t*>(begin + indices_begin()); }

    float value(std::int64_t entry) const {
        const std::uint8_t* const values = begin + values_begin();
        if (wide) return reinterpret_cast<const float*>(values)[entry];
        return widened(reinterpret_cast<const Bfloat16*>(values)[entry]);
    }
    // Return what is sent for it.
    float put(std::int64_t entry, float value) const {
        std::uint8_t* const values = begin + values_begin();
        if (wide) {
            reinterpret_cast<float*>(values)[entry] = value;
            return value;
        }
        narrow(value, reinterpret_cast<Bfloat16*>(values) + entry);
        return widened(reinterpret_cast<const Bfloat16*>(values)[entry]);
    }

    // Call `with(index within the chunk, value)` for all entries. A row may come from anybody: nothing is read or written
    // beyond what it stands for.
    template <typename With>
    void each(const With& with) const {
        std::int64_t entry = 0;
        for (std::int64_t block = 0; block < blocks(); ++block) {
            const std::int64_t end = ends()[block];
            if (end < entry || end > count) throw std::out_of_range("a sparse row counts more entries than it has");
            for (; entry < end; ++entry) {
                const std::int64_t index = block * INDEX_BLOCK + indices()[entry];
                if (index >= chunk_numel) throw std::out_of_range("an index of a sparse row is beyond its chunk");
                with(index, value(entry));
            }
        }
        if (entry != count) throw std::out_of_range("a sparse row counts fewer entries than it has");
    }
};

// As an integer the bits of |x| grow with it: infinity and then NaN on top.
inline std::uint32_t key_of(float value) { return as<std::uint32_t>(value) & 0x7FFFFFFFu; }

struct Candidate {
    std::int64_t index;
    float value;
};

// Elements whose key is `threshold` or more, in their order. Leaves inverse * p in `fresh`, if it is there.
template <typename Value>
inline void collect(const Chunk<Value>& chunk, std::int64_t numel, std::uint32_t threshold, float* fresh, float inverse,
                    std::vector<Candidate>& candidates) {
    candidates.clear();
    const Ints least = Ints{} + static_cast<std::int32_t>(threshold - 1);
    const bool streams = fresh != nullptr && aligned(fresh);
    std::int64_t k = 0;
    for (; k + LANES <= numel; k += LANES) {
        const Floats p = chunk.eight(k);
        if (streams) {
            stream(fresh + k, p * inverse);
        } else if (fresh != nullptr) {
            store(fresh + k, p * inverse);
        }
        std::uint32_t found = bits_of<0>(((as<Ints>(p) & ~SIGN) > least) & 1);
        for (; found != 0; found &= found - 1) {
            const int lane = __builtin_ctz(found);
            candidates.push_back({k + lane, p[lane]});
        }
    }
    for (; k < numel; ++k) {
        const float p = chunk.at(k);
        if (fresh != nullptr) fresh[k] = p * inverse;
        if (key_of(p) >= threshold) candidates.push_back({k, p});
    }
    streamed();
}

// Put what is among the `count` largest of the candidates in front, in their order: equal ones of the lower index first.
inline void keep_largest(std::vector<Candidate>& candidates, std::int64_t count) {
    if (static_cast<std::int64_t>(candidates.size()) <= count) return;
    std::vector<std::uint32_t> keys;
    keys.reserve(candidates.size());
    for (const Candidate& each : candidates) keys.push_back(key_of(each.value));
    std::nth_element(keys.begin(), keys.begin() + (count - 1), keys.end(), std::greater<>());
    const std::uint32_t smallest = keys[static_cast<std::size_t>(count - 1)];
    std::int64_t equal = count;
    for (const Candidate& each : candidates) equal -= key_of(each.value) > smallest;
    std::size_t kept = 0;
    for (const Candidate& each : candidates) {
        const std::uint32_t key = key_of(each.value);
        if (key > smallest || (key == smallest && equal-- > 0)) candidates[kept++] = each;
    }
    candidates.resize(kept);
}

// The `count` largest of a chunk, at most its length, in their order.
template <typename Value>
inline void choose(const Chunk<Value>& chunk, std::int64_t numel, std::int64_t count, float* fresh, float inverse,
                   std::vector<Candidate>& candidates) {
    const std::int64_t stride = numel / SAMPLE | 1;  // odd: the width of a matrix is rarely a multiple
    std::vector<std::uint32_t> sample;
    for (std::int64_t k = 0; k < numel; k += stride) sample.push_back(key_of(chunk.at(k)));
    const std::int64_t expected = (count + stride - 1) / stride;
    // Three deviations of a random sample's count.
    std::int64_t rank = expected + (stride == 1 ? 0 : static_cast<std::int64_t>(3 * std::sqrt(double(expected))) + 8);
    for (; rank <= static_cast<std::int64_t>(sample.size()); rank *= 2) {
        std::nth_element(sample.begin(), sample.begin() + (rank - 1), sample.end(), std::greater<>());
        const std::uint32_t threshold = sample[static_cast<std::size_t>(rank - 1)];
        if (threshold <= 1) break;
        collect(chunk, numel, threshold, fresh, inverse, candidates);
        if (static_cast<std::int64_t>(candidates.size()) >= count) return keep_largest(candidates, count);
    }
    collect(chunk, numel, 1, fresh, inverse, candidates);
    const std::int64_t missing = count - static_cast<std::int64_t>(candidates.size());
    if (missing <= 0) return keep_largest(candidates, count);
    // There are not as many other than zero. The zeros still needed are among the first `count` elements.
    std::vector<Candidate> zeros;
    for (std::int64_t k = 0; static_cast<std::int64_t>(zeros.size()) < missing; ++k) {
        const float p = chunk.at(k);
        if (key_of(p) == 0) zeros.push_back({k, p});
    }
    const auto middle = static_cast<std::ptrdiff_t>(candidates.size());
    candidates.insert(candidates.end(), zeros.begin(), zeros.end());
    std::inplace_merge(candidates.begin(), candidates.begin() + middle, candidates.end(),
                       [](const Candidate& one, const Candidate& other) { return one.index < other.index; });
}

// Write entries, and zeros behind the chunk's end if there are too few; leave in `fresh` what is not sent of them.
inline void write_row(const SparseRow& row, const std::vector<Candidate>& chosen, std::int64_t numel, float* fresh,
                      float inverse) {
    std::fill(row.begin, row.begin + row.nbytes(), std::uint8_t{0});
    std::int64_t entry = 0, block = 0;
    bool finite = true;
    const auto place = [&](std::int64_t index) {
        for (; block < index / INDEX_BLOCK; ++block) row.ends()[block] = static_cast<std::int32_t>(entry);
        row.indices()[entry] = static_cast<std::uint16_t>(index % INDEX_BLOCK);
    };
    for (const Candidate& each : chosen) {
        place(each.index);
        finite = finite && std::isfinite(each.value);
        const float sent = row.put(entry++, each.value);
        if (fresh != nullptr) fresh[each.index] = (each.value - sent) * inverse;
    }
    for (std::int64_t index = numel; entry < row.count; ++index, ++entry) place(index);
    for (; block < row.blocks(); ++block) row.ends()[block] = static_cast<std::int32_t>(entry);
    if (finite || chosen.empty()) return;
    row.put(0, NAN);
    if (fresh != nullptr) fresh[chosen[0].index] = NAN;
}

inline void sparse_select(const void* values, std::int64_t dtype, std::int64_t numel, double scale, std::uint8_t* payload,
                          std::int64_t stride, std::int64_t rows, std::int64_t chunk_numel, std::int64_t count,
                          std::int64_t value_dtype, const float* old, float* fresh, const float* loss_scale,
                          double decay, std::int64_t threads) {
    const Remainder remainder(old, fresh, loss_scale, decay);
    const float by = static_cast<float>(scale);
    const auto select = [&](const auto* source, std::int64_t number, std::vector<Candidate>& candidates) {
        const std::int64_t begin = number * chunk_numel;
        const std::int64_t present = std::clamp<std::int64_t>(numel - begin, 0, chunk_numel);
        const SparseRow row{payload + number * stride, chunk_numel, count, value_dtype == FLOAT32};
        const Chunk<std::decay_t<decltype(*source)>> chunk{source + begin, old == nullptr ? nullptr : old + begin, by,
                                                           remainder.factor};
        float* const kept = fresh == nullptr ? nullptr : fresh + begin;
        candidates.clear();
        if (present > 0) choose(chunk, present, std::min(count, present), kept, remainder.inverse, candidates);
        write_row(row, candidates, present, kept, remainder.inverse);
    };
    const std::int64_t worth = std::clamp<std::int64_t>(numel / NUMEL_OF_A_THREAD, 1, threads);
    spread(rows, 1, worth, [&](std::int64_t first, std::int64_t last) {
        std::vector<Candidate> candidates;
        for (std::int64_t number = first; number < last; ++number) {
            if (dtype == BFLOAT16) {
                select(static_cast<const Bfloat16*>(values), number, candidates);
            } else {
                select(static_cast<const float*>(values), number, candidates);
            }
        }
    });
}

inline void sparse_scatter(std::uint8_t* payload, std::int64_t stride, std::int64_t rows, std::int64_t chunk_numel,
                           std::int64_t count, std::int64_t value_dtype, void* values, std::int64_t dtype,
                           std::int64_t numel) {
    std::memset(values, 0, static_cast<std::size_t>(numel * (dtype == FLOAT32 ? 4 : 2)));
    for (std::int64_t number = 0; number < rows; ++number) {
        const std::int64_t begin = number * chunk_numel;
        const SparseRow row{payload + number * stride, chunk_numel, count, value_dtype == FLOAT32};
        row.each([&](std::int64_t index, float value) {
            if (begin + index >= numel) return;
            if (dtype == BFLOAT16) {
                narrow(value, static_cast<Bfloat16*>(values) + begin + index);
            } else {
                static_cast<float*>(values)[begin + index] = value;
            }
        });
    }
}

inline void sparse_sum(std::uint8_t* payloads, std::int64_t stride, std::int64_t peers, std::int64_t chunk_numel,
                       std::int64_t count, std::int64_t value_dtype, float* total) {
    std::memset(total, 0, static_cast<std::size_t>(chunk_numel) * sizeof *total);
    for (std::int64_t peer = 0; peer < peers; ++peer) {
        const SparseRow row{payloads + peer * stride, chunk_numel, count, value_dtype == FLOAT32};
        row.each([&](std::int64_t index, float value) { total[index] += value; });
    }
}

}  // namespace COMMOPT_TARGET
