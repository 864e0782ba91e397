// SPDX-License-Identifier: Apache-2.0
// Element types and their conversions, without a system header: run-time compilation (NVRTC) finds none.
#pragma once

// How a launch names an element type.
constexpr long long FLOAT32 = 0;
constexpr long long FLOAT16 = 1;
constexpr long long BFLOAT16 = 2;

// A 16-bit float held as its bits, so that copies never touch a value.
struct Half {
    unsigned short bits;
};

struct Bfloat16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(float value) { return value; }

__device__ __forceinline__ float to_float(Half value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
}

// A bfloat16 is the upper half of a float32 (PTX has this cvt only from sm_90 on).
__device__ __forceinline__ float to_float(Bfloat16 value) {
    return __uint_as_float(static_cast<unsigned int>(value.bits) << 16);
}

// Rounds to nearest even; what is too large becomes infinite; every NaN becomes the canonical one.
template <typename T>
__device__ T from_float(float value);

template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}

template <>
__device__ __forceinline__ Half from_float<Half>(float value) {
    Half result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

template <>
__device__ __forceinline__ Bfloat16 from_float<Bfloat16>(float value) {
    Bfloat16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

// N neighbours moved by one load or store; N * sizeof(T) is a power of two of at most 16 bytes.
template <typename T, int N>
struct alignas(N * sizeof(T)) Vector {
    T lane[N];
};

// Elements by which an address misses a boundary of N elements.
template <int N, typename T>
__device__ __forceinline__ int misalignment(const T* address) {
    return static_cast<int>(reinterpret_cast<unsigned long long>(address) / sizeof(T) % N);
}
