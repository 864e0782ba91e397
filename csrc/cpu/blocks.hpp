// SPDX-License-Identifier: Apache-2.0
// Block quantization: values to rows of payload and back, the sum of rows, and that sum encoded again. One pass over
// memory; a block is in the first cache meanwhile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "codecs.hpp"
#include "kernels.hpp"
#include "vectors.hpp"

namespace COMMOPT_TARGET {

constexpr std::int64_t NUMEL_OF_A_THREAD = 1 << 17;  // elements that are worth one

// Rows of payload: codes, an entry of 4 bytes for each block, zeros up to a multiple of 16 bytes.
struct PayloadRows {
    std::uint8_t* begin;
    std::int64_t stride, blocks, block;
    int bits;

    std::int64_t block_nbytes() const { return block * bits / 8; }
    std::uint8_t* codes(std::int64_t row, std::int64_t at) const { return begin + row * stride + at * block_nbytes(); }
    std::uint8_t* entries(std::int64_t row) const { return begin + row * stride + blocks * block_nbytes(); }
    std::int64_t entries_end() const { return blocks * (block_nbytes() + 4); }

    std::uint32_t entry(std::int64_t row, std::int64_t at) const {
        std::uint32_t entry;
        std::memcpy(&entry, entries(row) + 4 * at, sizeof entry);
        return entry;
    }
    void put_entry(std::int64_t row, std::int64_t at, std::uint32_t entry) const {
        std::memcpy(entries(row) + 4 * at, &entry, sizeof entry);
    }
    void end(std::int64_t row) const {
        const std::int64_t last = entries_end(), nbytes = (last + 15) / 16 * 16;
        std::memset(begin + row * stride + last, 0, static_cast<std::size_t>(nbytes - last));
    }
};

// What is added to values before they are encoded, and where what codes lose is kept, unscaled.
struct Remainder {
    const float* old;  // null: none
    float* fresh;
    float factor, inverse;

    Remainder(const float* old, float* fresh, const float* loss_scale, double decay)
        : old(old), fresh(fresh), factor(static_cast<float>(decay)), inverse(1.0f) {
        if (loss_scale == nullptr) return;
        factor = *loss_scale * factor;
        inverse = 1.0f / *loss_scale;
    }
};

// A block's elements, as float32.
struct BlockRoom {
    alignas(32) float p[MOST_BLOCK];
    alignas(32) float fresh[MOST_BLOCK];
    alignas(32) float chances[MOST_BLOCK];
};

struct Bfloat16 {
    std::uint16_t bits;
};

inline float widened(Bfloat16 value) { return as<float>(static_cast<std::uint32_t>(value.bits) << 16); }
inline float widened(float value) { return value; }

inline void narrow(float value, float* to) { *to = value; }
inline void narrow(float value, Bfloat16* to) {
    const std::uint32_t bits = as<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
    to->bits = static_cast<std::uint16_t>(value != value ? bits >> 16 | 0x40u : rounded);
}

// p = scale * values, zeros behind them.
template <typename Value>
inline void scaled(const Value* values, std::int64_t present, std::int64_t block, float scale, float* p) {
    for (std::int64_t at = 0; at < present; ++at) p[at] = widened(values[at]) * scale;
    std::fill(p + present, p + block, 0.0f);
}

// Philox4x32-10 (Salmon et al., SC 2011): numbers in [0, 1) for elements `begin` on, a multiple of 4.
struct Chances {
    static constexpr int SIDE = 4;  // vectors of four counters each, side by side
    std::uint64_t seed;
    std::uint32_t step, stream;

    void fill(std::int64_t begin, std::int64_t numel, float* chances) const {
        for (std::int64_t at = 0; at < numel; at += 16 * SIDE) {
            Longs words[4][SIDE];  // of which the upper halves do not matter
            for (int j = 0; j < SIDE; ++j) {
                const Longs index = Longs{0, 1, 2, 3} + (static_cast<std::uint64_t>(begin + at) / 4 + 4 * j);
                words[0][j] = index;
                words[1][j] = index >> 32;
                words[2][j] = Longs{} + step;
                words[3][j] = Longs{} + stream;
            }
            std::uint32_t key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
            for (int round = 0; round < 10; ++round) {
                for (int j = 0; j < SIDE; ++j) {
                    const Longs product0 = product(words[0][j], 0xD2511F53u), product1 = product(words[2][j], 0xCD9E8D57u);
                    words[0][j] = (product1 >> 32) ^ words[1][j] ^ key0;
                    words[1][j] = product1;
                    words[2][j] = (product0 >> 32) ^ words[3][j] ^ key1;
                    words[3][j] = product0;
                }
                key0 += 0x9E3779B9u;
                key1 += 0xBB67AE85u;
            }
            for (int j = 0; j < SIDE; ++j) {
                for (int lane = 0; lane < 4; ++lane) {
                    for (int word = 0; word < 4; ++word) {
                        const auto bits = static_cast<std::uint32_t>(words[word][j][lane]);
                        chances[at + 16 * j + 4 * lane + word] = static_cast<float>(bits >> 8) * 0x1p-24f;
                    }
                }
            }
        }
    }
};

// Encode the block in `room.p`, whose first `present` elements are real and lie at `begin` of all.
template <typename Codec, typename Rounding>
inline void encode_block(const PayloadRows& rows, std::int64_t row, std::int64_t at, const Remainder& remainder,
                         const Rounding& rounding, std::int64_t begin, std::int64_t present, BlockRoom& room) {
    float* const p = room.p;
    if (remainder.old != nullptr) {
        const float* const old = remainder.old + begin;
        for (std::int64_t k = 0; k < present; ++k) p[k] = p[k] + old[k] * remainder.factor;
    }
    const Codec codec(p, rows.block, absmax(p, rows.block));
    const Codec decoder(codec.entry());
    std::uint8_t* const codes = rows.codes(row, at);
    if (remainder.fresh == nullptr) {
        for (std::int64_t k = 0; k < rows.block; k += LANES) {
            write_codes<Codec::BITS>(codes + k / LANES * Codec::BITS, codec.code(load(p + k), rounding, k));
        }
    } else {
        const bool direct = present == rows.block && aligned(remainder.fresh + begin);
        float* const fresh = direct ? remainder.fresh + begin : room.fresh;
        for (std::int64_t k = 0; k < rows.block; k += LANES) {
            const Floats value = load(p + k);
            const Ints code = codec.code(value, rounding, k);
            write_codes<Codec::BITS>(codes + k / LANES * Codec::BITS, code);
            const Floats lost = (value - decoder.value(code)) * remainder.inverse;
            direct ? stream(fresh + k, lost) : store(fresh + k, lost);
        }
        streamed();
        if (!direct) std::copy(room.fresh, room.fresh + present, remainder.fresh + begin);
    }
    rows.put_entry(row, at, codec.entry());
}

// sums = the sum of a block over `peers` rows, in their order.
template <typename Codec>
inline void add_up_block(const PayloadRows& rows, std::int64_t row, std::int64_t peers, std::int64_t at, float* sums) {
    const std::uint8_t* codes = rows.codes(row, at);
    const Codec first(rows.entry(row, at));
    for (std::int64_t k = 0; k < rows.block; k += LANES) {
        store(sums + k, first.value(read_codes<Codec::BITS>(codes + k / LANES * Codec::BITS)));
    }
    for (std::int64_t peer = 1; peer < peers; ++peer) {
        codes = rows.codes(row + peer, at);
        const Codec codec(rows.entry(row + peer, at));
        for (std::int64_t k = 0; k < rows.block; k += LANES) {
            const Floats value = codec.value(read_codes<Codec::BITS>(codes + k / LANES * Codec::BITS));
            store(sums + k, load(sums + k) + value);
        }
    }
}

// Encode all blocks of `count` rows, of whose elements `numel` are real; `read(begin, present, block, p)` makes them.
template <typename Codec, bool STOCHASTIC, typename Read>
inline void encode_rows(const PayloadRows& rows, std::int64_t count, std::int64_t numel, const Remainder& remainder,
                        const Chances& chances, std::int64_t threads, const Read& read) {
    const std::int64_t worth = std::clamp<std::int64_t>(numel / NUMEL_OF_A_THREAD, 1, threads);
    spread(count * rows.blocks, 1, worth, [&](std::int64_t first, std::int64_t last) {
        BlockRoom room;
        for (std::int64_t number = first; number < last; ++number) {
            const std::int64_t row = number / rows.blocks, at = number % rows.blocks, begin = number * rows.block;
            const std::int64_t present = std::clamp<std::int64_t>(numel - begin, 0, rows.block);
            if (at == rows.blocks - 1) rows.end(row);
            if (present == 0) {
                std::memset(rows.codes(row, at), Codec::ZEROS, static_cast<std::size_t>(rows.block_nbytes()));
                rows.put_entry(row, at, 0);
                continue;
            }
            read(begin, present, at, room.p);
            if constexpr (STOCHASTIC) {
                chances.fill(begin, rows.block, room.chances);
                encode_block<Codec>(rows, row, at, remainder, Stochastic{room.chances}, begin, present, room);
            } else {
                encode_block<Codec>(rows, row, at, remainder, Nearest{}, begin, present, room);
            }
        }
    });
}

// Call `with(codec, stochastic)` for the codec of a number: those of block_codecs.py, in this order.
template <typename With>
inline void of_codec(std::int64_t codec, const With& with) {
    using No = std::false_type;
    using Yes = std::true_type;
    switch (codec) {
        case 0: return with(static_cast<Uniform<8>*>(nullptr), No{});
        case 1: return with(static_cast<Uniform<4>*>(nullptr), No{});
        case 2: return with(static_cast<Uniform<2>*>(nullptr), No{});
        case 3: return with(static_cast<Uniform<8>*>(nullptr), Yes{});
        case 4: return with(static_cast<Uniform<4>*>(nullptr), Yes{});
        case 5: return with(static_cast<Uniform<2>*>(nullptr), Yes{});
        case 6: return with(static_cast<Companded*>(nullptr), No{});
        case 7: return with(static_cast<Centroids*>(nullptr), No{});
        case 8: return with(static_cast<Sign<Mean>*>(nullptr), No{});
        default: return with(static_cast<Sign<RootMeanSquare>*>(nullptr), No{});
    }
}

constexpr std::int64_t FLOAT32 = 0, BFLOAT16 = 2;  // what Python calls the dtypes of values

inline void encode(std::int64_t codec, const void* values, std::int64_t dtype, std::int64_t numel, double scale,
                   std::uint8_t* payload, std::int64_t stride, std::int64_t rows, std::int64_t blocks,
                   std::int64_t block, const float* old, float* fresh, const float* loss_scale, double decay,
                   std::int64_t seed, std::int64_t step, std::int64_t stream, std::int64_t threads) {
    of_codec(codec, [&](auto* kind, auto stochastic) {
        using Codec = std::remove_pointer_t<decltype(kind)>;
        const PayloadRows target{payload, stride, blocks, block, Codec::BITS};
        const Chances chances{static_cast<std::uint64_t>(seed), static_cast<std::uint32_t>(step),
                              static_cast<std::uint32_t>(stream)};
        const float by = static_cast<float>(scale);
        encode_rows<Codec, decltype(stochastic)::value>(
            target, rows, numel, Remainder(old, fresh, loss_scale, decay), chances, threads,
            [&](std::int64_t begin, std::int64_t present, std::int64_t, float* p) {
                if (dtype == BFLOAT16) {
                    scaled(static_cast<const Bfloat16*>(values) + begin, present, block, by, p);
                } else {
                    scaled(static_cast<const float*>(values) + begin, present, block, by, p);
                }
            });
    });
}

inline void recode(std::int64_t codec, std::uint8_t* payloads, std::int64_t stride, std::int64_t peers,
                   std::uint8_t* payload, std::int64_t blocks, std::int64_t block, std::int64_t numel,
                   const float* old, float* fresh, const float* loss_scale, double decay, std::int64_t seed,
                   std::int64_t step, std::int64_t stream, std::int64_t threads) {
    of_codec(codec, [&](auto* kind, auto stochastic) {
        using Codec = std::remove_pointer_t<decltype(kind)>;
        const PayloadRows sources{payloads, stride, blocks, block, Codec::BITS};
        const PayloadRows target{payload, 0, blocks, block, Codec::BITS};
        const Chances chances{static_cast<std::uint64_t>(seed), static_cast<std::uint32_t>(step),
                              static_cast<std::uint32_t>(stream)};
        encode_rows<Codec, decltype(stochastic)::value>(
            target, 1, numel, Remainder(old, fresh, loss_scale, decay), chances, threads,
            [&](std::int64_t, std::int64_t present, std::int64_t at, float* p) {
                add_up_block<Codec>(sources, 0, peers, at, p);
                std::fill(p + present, p + block, 0.0f);
            });
    });
}

// Values of rows; or, where there are `peers`, the sum of so many rows.
inline void decode(std::int64_t codec, std::uint8_t* payload, std::int64_t stride, std::int64_t rows,
                   std::int64_t blocks, std::int64_t block, std::int64_t peers, void* values, std::int64_t dtype,
                   std::int64_t numel, std::int64_t threads) {
    of_codec(codec, [&](auto* kind, auto) {
        using Codec = std::remove_pointer_t<decltype(kind)>;
        const PayloadRows sources{payload, stride, blocks, block, Codec::BITS};
        const std::int64_t worth = std::clamp<std::int64_t>(numel * peers / NUMEL_OF_A_THREAD, 1, threads);
        spread(rows * blocks, 1, worth, [&](std::int64_t first, std::int64_t last) {
            alignas(32) float sums[MOST_BLOCK];
            for (std::int64_t number = first; number < last; ++number) {
                const std::int64_t begin = number * block, present = std::min(numel - begin, block);
                if (present <= 0) break;
                float* const wide = static_cast<float*>(values) + begin;
                const bool direct = dtype == FLOAT32 && present == block;
                add_up_block<Codec>(sources, number / blocks, peers, number % blocks, direct ? wide : sums);
                if (direct) continue;
                if (dtype == BFLOAT16) {
                    for (std::int64_t k = 0; k < present; ++k) narrow(sums[k], static_cast<Bfloat16*>(values) + begin + k);
                } else {
                    std::copy(sums, sums + present, wide);
                }
            }
        });
    });
}

}  // namespace COMMOPT_TARGET
