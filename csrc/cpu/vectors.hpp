// SPDX-License-Identifier: Apache-2.0
// Eight float32 or four float64 at once, as the compiler knows them, and work spread over threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace COMMOPT_TARGET {

constexpr std::int64_t LANES = 8;

typedef float Floats __attribute__((vector_size(32)));

inline Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

inline void store(float* to, Floats values) { std::memcpy(to, &values, sizeof values); }

// The same past the caches, for what is not needed again soon: memory is not read to be overwritten. 32-byte aligned.
inline void stream(float* to, Floats values) {
#ifdef __AVX__
    _mm256_stream_ps(to, reinterpret_cast<__m256>(values));
#else
    store(to, values);
#endif
}

// What this thread has streamed, others see from here on.
inline void streamed() {
#ifdef __AVX__
    _mm_sfence();
#endif
}

inline bool aligned(const float* at) { return reinterpret_cast<std::uintptr_t>(at) % sizeof(Floats) == 0; }

inline void prefetch(const float* from) { __builtin_prefetch(from); }

inline Floats all(float value) { return Floats{} + value; }

inline float sum(Floats v) {
#ifdef __AVX__
    const __m256 whole = reinterpret_cast<__m256>(v);
    const __m128 halves = _mm_add_ps(_mm256_castps256_ps128(whole), _mm256_extractf128_ps(whole, 1));
    const __m128 pairs = _mm_hadd_ps(halves, halves);
    return _mm_cvtss_f32(_mm_hadd_ps(pairs, pairs));
#else
    return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
#endif
}

// Call `work(first, last)` for parts of [0, count), one in each thread, each but the last a multiple of `unit`.
template <typename Work>
void spread(std::int64_t count, std::int64_t unit, std::int64_t threads, const Work& work) {
    const std::int64_t units = (count + unit - 1) / unit;
    if (threads > units) threads = units;
    if (threads <= 1) {
        work(std::int64_t{0}, count);
        return;
    }
    const auto edge = [&](std::int64_t part) {
        const std::int64_t at = units * part / threads * unit;
        return at < count ? at : count;
    };
    std::vector<std::thread> others;
    for (std::int64_t part = 1; part < threads; ++part) {
        others.emplace_back([&, part] { work(edge(part), edge(part + 1)); });
    }
    work(edge(0), edge(1));
    for (std::thread& other : others) other.join();
}

}  // namespace COMMOPT_TARGET
