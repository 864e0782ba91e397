// Move a list of tensors into one flat buffer or back, with a cast and a scale, in one launch.
//
// The work is cut into chunks, none of which crosses a tensor; a CUDA block has one. A table tells where the tensors
// are: one Row per tensor and a last one that holds the totals.
#pragma once

#include "dtype.cuh"

struct Row {
    void* tensor;            // first element
    long long flat_offset;   // its element in the flat buffer
    long long first_chunk;   // the tensor's first chunk, counted over the whole list
};

// A float32 product, which from_float then rounds to the target; to float32 the product is the only rounding.
template <typename Source, typename Target>
struct Scale {
    using From = Source;
    using To = Target;
    float factor;

    __device__ __forceinline__ Target operator()(Source value) const {
        return from_float<Target>(__fmul_rn(to_float(value), factor));
    }
};

// Keeps every bit, NaN payloads too.
template <typename Word>
struct Copy {
    using From = Word;
    using To = Word;

    __device__ __forceinline__ Word operator()(Word value) const { return value; }
};

template <typename Convert, typename Source>
__device__ __forceinline__ typename Convert::To apply(const Convert& convert, Source value) {
    return convert(value);
}

template <typename Convert, typename Source, int N>
__device__ __forceinline__ Vector<typename Convert::To, N> apply(const Convert& convert, Vector<Source, N> values) {
    Vector<typename Convert::To, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) result.lane[i] = convert(values.lane[i]);
    return result;
}

// Convert `count` neighbours (scalars or vectors) with the whole block; all loads of a batch leave before its first store.
template <int BATCH, typename Convert, typename In, typename Out>
__device__ __forceinline__ void sweep(const Convert& convert, const In* in, Out* out, int count) {
    const int stride = blockDim.x;
    int i = threadIdx.x;
#pragma unroll 1
    for (; i + (BATCH - 1) * stride < count; i += BATCH * stride) {
        In batch[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; ++k) batch[k] = in[i + k * stride];
#pragma unroll
        for (int k = 0; k < BATCH; ++k) out[i + k * stride] = apply(convert, batch[k]);
    }
#pragma unroll 1
    for (; i < count; i += stride) out[i] = apply(convert, in[i]);
}

// Convert one chunk: 16-byte accesses when source and target reach a boundary together, coalesced scalars otherwise.
template <typename Convert>
__device__ __forceinline__ void convert_chunk(const Convert& convert, const typename Convert::From* source,
                                              typename Convert::To* target, int count) {
    using From = typename Convert::From;
    using To = typename Convert::To;
    constexpr int WIDTH = 16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
    const int miss = misalignment<WIDTH>(source);
    if (miss != misalignment<WIDTH>(target)) {
        sweep<8>(convert, source, target, count);
        return;
    }
    const int head = min((WIDTH - miss) % WIDTH, count);
    const int vectors = (count - head) / WIDTH;
    const int body_end = head + vectors * WIDTH;
    sweep<1>(convert, source, target, head);
    sweep<4>(convert, reinterpret_cast<const Vector<From, WIDTH>*>(source + head),
             reinterpret_cast<Vector<To, WIDTH>*>(target + head), vectors);
    sweep<1>(convert, source + body_end, target + body_end, count - body_end);
}

// The tensor that a chunk belongs to. Each thread looks at some of the rows: a search by halves would wait for one load
// after the other.
__device__ __forceinline__ const Row& find_row(const Row* rows, long long tensors, long long chunk) {
    __shared__ long long found;
    for (long long i = threadIdx.x; i < tensors; i += blockDim.x) {
        const long long first = rows[i].first_chunk;
        const long long end = rows[i + 1].first_chunk;
        if (first <= chunk && chunk < end) found = i;
    }
    __syncthreads();
    return rows[found];
}

template <typename Convert>
__device__ __forceinline__ void transfer(const Convert& convert, const Row* rows, long long tensors, void* flat,
                                         long long chunk_numel, long long to_flat) {
    using From = typename Convert::From;
    using To = typename Convert::To;
    const Row& row = find_row(rows, tensors, blockIdx.x);
    const Row& next = *(&row + 1);
    const long long start = (blockIdx.x - row.first_chunk) * chunk_numel;
    const long long in_flat = row.flat_offset + start;
    const int count = static_cast<int>(min(chunk_numel, next.flat_offset - in_flat));
    if (to_flat) {
        convert_chunk(convert, static_cast<const From*>(row.tensor) + start, static_cast<To*>(flat) + in_flat, count);
    } else {
        convert_chunk(convert, static_cast<const From*>(flat) + in_flat, static_cast<To*>(row.tensor) + start, count);
    }
}

// transfer_SOURCE_TARGET: one CUDA block per chunk. to_flat is 1 to pack, 0 to unpack. transfer_bits_*: same dtype,
// scale 1.

extern "C" __global__ void transfer_bits_32(const Row* rows, long long tensors, void* flat, long long chunk_numel,
                                            long long to_flat) {
    transfer(Copy<unsigned int>{}, rows, tensors, flat, chunk_numel, to_flat);
}

extern "C" __global__ void transfer_bits_16(const Row* rows, long long tensors, void* flat, long long chunk_numel,
                                            long long to_flat) {
    transfer(Copy<unsigned short>{}, rows, tensors, flat, chunk_numel, to_flat);
}

extern "C" __global__ void transfer_f32_f32(const Row* rows, long long tensors, void* flat, long long chunk_numel,
                                            long long to_flat, double scale) {
    transfer(Scale<float, float>{static_cast<float>(scale)}, rows, tensors, flat, chunk_numel, to_flat);
}

extern "C" __global__ void transfer_f32_f16(const Row* rows, long long tensors, void* flat, long long chunk_numel,
                                            long long to_flat, double scale) {
    transfer(Scale<float, Half>{static_cast<float>(scale)}, rows, tensors, flat, chunk_numel, to_flat);
}

extern "C" __global__ void transfer_f32_bf16(const Row* rows, long long tensors, void* flat, long long chunk_numel,
                                             long long to_flat, double scale) {
    transfer(Scale<float, Bfloat16>{static_cast<float>(scale)}, rows, tensors, flat, chunk_numel, to_flat);
}

extern "C" __global__ void transfer_f16_f32(const Row* rows, long long tensors, void* flat, long long chunk_numel,
                                            long long to_flat, double scale) {
    transfer(Scale<Half, float>{static_cast<float>(scale)}, rows, tensors, flat, chunk_numel, to_flat);
}

extern "C" __global__ void transfer_f16_f16(const Row* rows, long long tensors, void* flat, long long chunk_numel,
                                            long long to_flat, double scale) {
    transfer(Scale<Half, Half>{static_cast<float>(scale)}, rows, tensors, flat, chunk_numel, to_flat);
}

extern "C" __global__ void transfer_f16_bf16(const Row* rows, long long tensors, void* flat, long long chunk_numel,
                                             long long to_flat, double scale) {
    transfer(Scale<Half, Bfloat16>{static_cast<float>(scale)}, rows, tensors, flat, chunk_numel, to_flat);
}

extern "C" __global__ void transfer_bf16_f32(const Row* rows, long long tensors, void* flat, long long chunk_numel,
                                             long long to_flat, double scale) {
    transfer(Scale<Bfloat16, float>{static_cast<float>(scale)}, rows, tensors, flat, chunk_numel, to_flat);
}

extern "C" __global__ void transfer_bf16_f16(const Row* rows, long long tensors, void* flat, long long chunk_numel,
                                             long long to_flat, double scale) {
    transfer(Scale<Bfloat16, Half>{static_cast<float>(scale)}, rows, tensors, flat, chunk_numel, to_flat);
}

extern "C" __global__ void transfer_bf16_bf16(const Row* rows, long long tensors, void* flat, long long chunk_numel,
                                              long long to_flat, double scale) {
    transfer(Scale<Bfloat16, Bfloat16>{static_cast<float>(scale)}, rows, tensors, flat, chunk_numel, to_flat);
}
