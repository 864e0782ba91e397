// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): random bits without a state.
#pragma once

// Equal dice give equal bits for equal elements, on every machine.
struct Dice {
    unsigned long long seed;   // the key
    unsigned int step;         // the upper half of the counter, with the stream; the lower half is the element / 4
    unsigned int stream;
};

// Four independent words for the four elements that begin at `element`, a multiple of 4.
__device__ __forceinline__ void philox(const Dice& dice, unsigned long long element, unsigned int (&words)[4]) {
    const unsigned long long index = element / 4;
    unsigned int key0 = static_cast<unsigned int>(dice.seed);
    unsigned int key1 = static_cast<unsigned int>(dice.seed >> 32);
    words[0] = static_cast<unsigned int>(index);
    words[1] = static_cast<unsigned int>(index >> 32);
    words[2] = dice.step;
    words[3] = dice.stream;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned long long product0 = 0xD2511F53ull * words[0];
        const unsigned long long product1 = 0xCD9E8D57ull * words[2];
        words[0] = static_cast<unsigned int>(product1 >> 32) ^ words[1] ^ key0;
        words[1] = static_cast<unsigned int>(product1);
        words[2] = static_cast<unsigned int>(product0 >> 32) ^ words[3] ^ key1;
        words[3] = static_cast<unsigned int>(product0);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

// The upper 24 bits of a word as a number in [0, 1), exactly.
__device__ __forceinline__ float unit_interval(unsigned int word) { return static_cast<float>(word >> 8) * 0x1p-24f; }
