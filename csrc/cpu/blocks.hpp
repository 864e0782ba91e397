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

constexpr std::int64_t BLOCKS_AT_ONCE = 8;   // short ones: what one waits for, another need not
constexpr std::int64_t NUMEL_AT_ONCE = 512;  // elements of such
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

    const float* of(std::int64_t begin) const { return old == nullptr ? nullptr : old + begin; }
};

// A block's elements, as float32.
struct BlockRoom {
    alignas(32) float p[MOST_BLOCK];
    alignas(32) float fresh[MOST_BLOCK];
    alignas(32) float chances[MOST_BLOCK];
    alignas(32) float sums[MOST_BLOCK];
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

inline Floats eight_of(const float* values) { return load(values); }
inline Floats eight_of(const Bfloat16* values) {
    typedef std::uint16_t Halves __attribute__((vector_size(16)));
    Halves halves;
    std::memcpy(&halves, values, sizeof halves);
    return as<Floats>(__builtin_convertvector(halves, Words) << 16);
}

// The p = scale * values + factor * old of a chunk or a block, made where it is asked for.
template <typename Value>
struct Chunk {
    const Value* values;
    const float* old;  // null: none
    float scale, factor;

    float at(std::int64_t k) const {
        const float value = widened(values[k]) * scale;
        return old == nullptr ? value : value + old[k] * factor;
    }
    Floats eight(std::int64_t k) const {
        const Floats v = eight_of(values + k) * scale;
        return old == nullptr ? v : v + load(old + k) * factor;
    }
};

// Where elements lie in a buffer: one after the other, or, where there are parts, in those, which lack none.
struct Places {
    const Part* parts;  // `from` the buffer, `to` the elements
    std::int64_t count;

    // Call `with(place, at, numel)` for each stretch of elements [begin, begin + numel), of which it begins at `at`.
    template <typename With>
    void each(std::int64_t begin, std::int64_t numel, const With& with) const {
        if (count == 0) return with(begin, std::int64_t{0}, numel);
        const Part* part = of(begin);
        for (std::int64_t at = 0; at < numel; ++part) {
            const std::int64_t skipped = begin + at - part->to, stretch = std::min(part->numel - skipped, numel - at);
            with(part->from + skipped, at, stretch);
            at += stretch;
        }
    }

    // The place of elements that lie one after the other; -1 where they do not.
    std::int64_t together(std::int64_t begin, std::int64_t numel) const {
        if (count == 0) return begin;
        const Part* part = of(begin);
        const std::int64_t skipped = begin - part->to;
        return skipped + numel <= part->numel ? part->from + skipped : -1;
    }

  private:
    const Part* of(std::int64_t element) const {
        const auto before = [](std::int64_t at, const Part& part) { return at < part.to; };
        return std::upper_bound(parts, parts + count, element, before) - 1;
    }
};

// The elements of a block, in `room` where they do not lie together.
template <typename Value>
inline const Value* gathered(const Value* values, const Places& places, std::int64_t begin, std::int64_t numel,
                             float* room) {
    const std::int64_t place = places.together(begin, numel);
    if (place >= 0) return values + place;
    Value* const joined = reinterpret_cast<Value*>(room);
    places.each(begin, numel, [&](std::int64_t from, std::int64_t at, std::int64_t stretch) {
        std::copy(values + from, values + from + stretch, joined + at);
    });
    return joined;
}

// Put a block whose first `present` elements are real into p, zeros behind them; return the absmax.
template <typename Value>
inline float fill(const Chunk<Value>& source, std::int64_t present, std::int64_t block, float* p) {
    Ints most = {};
    const std::int64_t whole = present / LANES * LANES;
    if (present < block) {
        for (std::int64_t k = whole; k < present; ++k) p[k] = source.at(k);
        std::fill(p + present, p + block, 0.0f);
        for (std::int64_t k = whole; k < block; k += LANES) most = larger(most, as<Ints>(load(p + k)) & ~SIGN);
    }
    for (std::int64_t k = 0; k < whole; k += LANES) {
        const Floats value = source.eight(k);
        store(p + k, value);
        most = larger(most, as<Ints>(value) & ~SIGN);
    }
    return largest(most);
}

// Philox4x32-10 (Salmon et al., SC 2011): numbers in [0, 1) for elements `begin` on, a multiple of 4.
struct Chances {
    static constexpr int SIDE = 4;  // vectors of four counters each, side by side
    static constexpr std::uint64_t LOWER = 0xFFFFFFFFu;
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
            for (int j = 0; j < SIDE; ++j) {  // words of one counter side by side
                const Longs pairs[2] = {(words[0][j] & LOWER) | words[1][j] << 32,
                                        (words[2][j] & LOWER) | words[3][j] << 32};
                for (int half = 0; half < 2; ++half) {
                    const Longs order = Longs{0, 4, 1, 5} + 2 * half;
                    const Words bits = as<Words>(__builtin_shuffle(pairs[0], pairs[1], order)) >> 8;
                    store(chances + at + 16 * j + 8 * half, __builtin_convertvector(as<Ints>(bits), Floats) * 0x1p-24f);
                }
            }
        }
    }
};

// Encode the block in `p` to `codes`; leave in `fresh` (null: nowhere), which is 32-byte aligned, what codes lose.
template <bool STREAMS, typename Codec, typename Rounding>
inline void write_block(const Codec& codec, const float* p, std::int64_t block, const Rounding& rounding,
                        std::uint8_t* codes, float* fresh, float inverse) {
    const Codec decoder(codec.entry());
    for (std::int64_t k = 0; k < block; k += SUMMED) {
        Ints found[SUMMED / LANES];
        for (int j = 0; j < SUMMED / LANES; ++j) {
            const std::int64_t at = k + j * LANES;
            const Floats value = load(p + at);
            found[j] = codec.code(value, rounding, at);
            if (fresh == nullptr) continue;
            const Floats lost = (value - decoder.value(found[j])) * inverse;
            STREAMS ? stream(fresh + at, lost) : store(fresh + at, lost);
        }
        write_codes<Codec::BITS>(codes + k / LANES * Codec::BITS, found);
    }
}

// Encode the block that `p` and its codec are of, whose first `present` elements are real and lie at `begin` of all.
template <typename Codec, typename Rounding>
inline void encode_block(const PayloadRows& rows, std::int64_t row, std::int64_t at, const Remainder& remainder,
                         const Rounding& rounding, const Codec& codec, const float* p, std::int64_t begin,
                         std::int64_t present, BlockRoom& room) {
    float* const fresh = remainder.fresh == nullptr ? nullptr : remainder.fresh + begin;
    std::uint8_t* const codes = rows.codes(row, at);
    if (fresh != nullptr && present == rows.block && aligned(fresh)) {
        write_block<true>(codec, p, rows.block, rounding, codes, fresh, remainder.inverse);
    } else {
        write_block<false>(codec, p, rows.block, rounding, codes, fresh == nullptr ? fresh : room.fresh,
                           remainder.inverse);
        if (fresh != nullptr) std::copy(room.fresh, room.fresh + present, fresh);
    }
    rows.put_entry(row, at, codec.entry());
}

// out = the sum (before, null: nothing) + the values of a block of one row, or of two, in their order.
template <bool STREAMS, typename Codec>
inline void add_rows(const PayloadRows& rows, std::int64_t row, std::int64_t count, std::int64_t at,
                     const float* before, float* out) {
    const Codec one(rows.entry(row, at)), other(rows.entry(row + count - 1, at));
    const std::uint8_t *const codes = rows.codes(row, at), *const others = rows.codes(row + count - 1, at);
    for (std::int64_t k = 0; k < rows.block; k += LANES) {
        const std::int64_t place = k / LANES * Codec::BITS;
        Floats total = one.value(read_codes<Codec::BITS>(codes + place));
        if (before != nullptr) total = load(before + k) + total;
        if (count == 2) total += other.value(read_codes<Codec::BITS>(others + place));
        STREAMS ? stream(out + k, total) : store(out + k, total);
    }
}

// sums = the sum of a block over `peers` rows, in their order, by way of `room`.
template <bool STREAMS, typename Codec>
inline void add_up_block(const PayloadRows& rows, std::int64_t row, std::int64_t peers, std::int64_t at, float* room,
                         float* sums) {
    const float* before = nullptr;
    for (; peers > 2; row += 2, peers -= 2, before = room) add_rows<false, Codec>(rows, row, 2, at, before, room);
    add_rows<STREAMS, Codec>(rows, row, peers, at, before, sums);
}

// Encode all blocks of `count` rows, of whose elements `numel` are real; `source_of(begin, block, room)` has them.
template <typename Codec, bool STOCHASTIC, typename SourceOf>
inline void encode_rows(const PayloadRows& rows, std::int64_t count, std::int64_t numel, const Remainder& remainder,
                        const Chances& chances, std::int64_t threads, const SourceOf& source_of) {
    if (rows.blocks == 0) return;
    const std::int64_t worth = std::clamp<std::int64_t>(numel / NUMEL_OF_A_THREAD, 1, threads);
    const std::int64_t together = std::clamp<std::int64_t>(NUMEL_AT_ONCE / rows.block, 1, BLOCKS_AT_ONCE);
    spread(count * rows.blocks, 1, worth, [&](std::int64_t first, std::int64_t last) {
        BlockRoom room;
        Codec codecs[BLOCKS_AT_ONCE];
        std::int64_t row = first / rows.blocks, at = first % rows.blocks;
        for (std::int64_t number = first; number < last;) {
            const std::int64_t begin = number * rows.block;
            const auto present = [&](std::int64_t k) {
                return std::clamp<std::int64_t>(numel - begin - k * rows.block, 0, rows.block);
            };
            std::int64_t filled = 0;
            float absmax[BLOCKS_AT_ONCE];
            for (; filled < std::min({together, last - number, rows.blocks - at}) && present(filled) > 0; ++filled) {
                const auto source = source_of(begin + filled * rows.block, at + filled, room.sums);
                absmax[filled] = fill(source, present(filled), rows.block, room.p + filled * rows.block);
            }
            for (std::int64_t k = 0; k < filled; ++k) codecs[k] = Codec(room.p + k * rows.block, rows.block, absmax[k]);
            for (std::int64_t k = 0; k < filled; ++k) {
                const std::int64_t place = begin + k * rows.block;
                const float* const p = room.p + k * rows.block;
                if constexpr (STOCHASTIC) {
                    chances.fill(place, rows.block, room.chances);
                    const Stochastic rounding{room.chances};
                    encode_block(rows, row, at + k, remainder, rounding, codecs[k], p, place, present(k), room);
                } else {
                    encode_block(rows, row, at + k, remainder, Nearest{}, codecs[k], p, place, present(k), room);
                }
            }
            if (filled == 0) {
                std::memset(rows.codes(row, at), Codec::ZEROS, static_cast<std::size_t>(rows.block_nbytes()));
                rows.put_entry(row, at, 0);
                filled = 1;
            }
            number += filled;
            at += filled;
            if (at < rows.blocks) continue;
            rows.end(row);
            ++row;
            at = 0;
        }
        streamed();
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
                   std::int64_t seed, std::int64_t step, std::int64_t stream, const Part* parts, std::int64_t count,
                   std::int64_t threads) {
    const Places places{parts, count};
    of_codec(codec, [&](auto* kind, auto stochastic) {
        using Codec = std::remove_pointer_t<decltype(kind)>;
        const PayloadRows target{payload, stride, blocks, block, Codec::BITS};
        const Chances chances{static_cast<std::uint64_t>(seed), static_cast<std::uint32_t>(step),
                              static_cast<std::uint32_t>(stream)};
        const Remainder remainder(old, fresh, loss_scale, decay);
        const float by = static_cast<float>(scale);
        const auto encode_all = [&](const auto* from) {
            using Value = std::decay_t<decltype(*from)>;
            encode_rows<Codec, decltype(stochastic)::value>(
                target, rows, numel, remainder, chances, threads,
                [&](std::int64_t begin, std::int64_t, float* room) {
                    const Value* const here = gathered(from, places, begin, std::min(numel - begin, block), room);
                    return Chunk<Value>{here, remainder.of(begin), by, remainder.factor};
                });
        };
        if (dtype == BFLOAT16) return encode_all(static_cast<const Bfloat16*>(values));
        encode_all(static_cast<const float*>(values));
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
        const Remainder remainder(old, fresh, loss_scale, decay);
        encode_rows<Codec, decltype(stochastic)::value>(
            target, 1, numel, remainder, chances, threads,
            [&](std::int64_t begin, std::int64_t at, float* room) {
                add_up_block<false, Codec>(sources, 0, peers, at, room, room);
                return Chunk<float>{room, remainder.of(begin), 1.0f, remainder.factor};
            });
    });
}

// Values of rows; or, where there are `peers`, the sum of so many rows.
inline void decode(std::int64_t codec, std::uint8_t* payload, std::int64_t stride, std::int64_t rows,
                   std::int64_t blocks, std::int64_t block, std::int64_t peers, void* values, std::int64_t dtype,
                   std::int64_t numel, const Part* parts, std::int64_t count, std::int64_t threads) {
    const Places places{parts, count};
    of_codec(codec, [&](auto* kind, auto) {
        using Codec = std::remove_pointer_t<decltype(kind)>;
        const PayloadRows sources{payload, stride, blocks, block, Codec::BITS};
        const std::int64_t worth = std::clamp<std::int64_t>(numel * peers / NUMEL_OF_A_THREAD, 1, threads);
        spread(rows * blocks, 1, worth, [&](std::int64_t first, std::int64_t last) {
            alignas(32) float sums[MOST_BLOCK];
            for (std::int64_t number = first; number < last; ++number) {
                const std::int64_t begin = number * block, present = std::min(numel - begin, block);
                if (present <= 0) break;
                const std::int64_t row = number / blocks, at = number % blocks;
                const std::int64_t place = places.together(begin, present);
                if (dtype == FLOAT32 && present == block && place >= 0) {
                    float* const wide = static_cast<float*>(values) + place;
                    const bool past_caches = numel > NUMEL_OF_A_THREAD && aligned(wide);
                    if (past_caches) add_up_block<true, Codec>(sources, row, peers, at, sums, wide);
                    if (!past_caches) add_up_block<false, Codec>(sources, row, peers, at, sums, wide);
                    continue;
                }
                add_up_block<false, Codec>(sources, row, peers, at, sums, sums);
                places.each(begin, present, [&](std::int64_t to, std::int64_t from, std::int64_t stretch) {
                    if (dtype == BFLOAT16) {
                        Bfloat16* const narrow_ones = static_cast<Bfloat16*>(values) + to;
                        for (std::int64_t k = 0; k < stretch; ++k) narrow(sums[from + k], narrow_ones + k);
                    } else {
                        std::copy(sums + from, sums + from + stretch, static_cast<float*>(values) + to);
                    }
                });
            }
            streamed();
        });
    });
}

// Copy each part: what is long goes past the caches, for it is not needed again soon.
inline void copy(const float* from, float* to, const Part* parts, std::int64_t count, std::int64_t threads) {
    for (const Part* each = parts; each != parts + count; ++each) {
        const float* const source = from + each->from;
        float* const target = to + each->to;
        if (each->numel < NUMEL_OF_A_THREAD) {
            std::copy(source, source + each->numel, target);
            continue;
        }
        const std::int64_t worth = std::clamp<std::int64_t>(each->numel / NUMEL_OF_A_THREAD, 1, threads);
        spread(each->numel, 2 * LANES, worth, [&](std::int64_t at, std::int64_t last) {
            for (; !aligned(target + at); ++at) target[at] = source[at];
            for (; at + LANES <= last; at += LANES) stream(target + at, load(source + at));
            std::copy(source + at, source + last, target + at);
            streamed();
        });
    }
}

}  // namespace COMMOPT_TARGET
