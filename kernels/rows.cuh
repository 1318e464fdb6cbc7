// Rows of bf16, fp16 or float32 read and written in accesses of 16 bytes or of one element: what routing.cu and
// activation.cu share. Knows nothing of routing or of the activation.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/types.cuh"
#include "ptx/vector.cuh"

namespace cupy_gmm {

inline constexpr int kRowThreads = 256;

// A 2-D array. `pitch` and `step` count accesses, not bytes: the host divides by 16 bytes on the wide path (where
// step is 1) and by the element size on the other.
struct Rows {
    void* data;
    i64 pitch;
    i64 step;
};
static_assert(sizeof(Rows) == 24, "mirrored by cupy_gmm/_rowwise.py");

template <class Raw>
__device__ __forceinline__ Raw* row_at(const Rows& rows, i64 row, i64 column) {
    return static_cast<Raw*>(rows.data) + row * rows.pitch + column * rows.step;
}

// One access of an array that the launch does not write.
template <class Raw>
__device__ __forceinline__ Raw load_access(const Rows& rows, i64 row, i64 column) {
    return *row_at<Raw>(rows, row, column);
}
template <>
__device__ __forceinline__ Vec16 load_access<Vec16>(const Rows& rows, i64 row, i64 column) {
    return load_16_bytes(row_at<Vec16>(rows, row, column));
}

template <class T>
__device__ __forceinline__ float to_float(T value) {
    return Convert<T>::load(value);
}
template <>
__device__ __forceinline__ float to_float<float>(float value) {
    return value;
}

// How kCount elements of type T travel in one access (Raw) and become floats.
template <class T, bool kWide>
struct Access {
    static constexpr int kCount = 1;
    using Raw = T;
    __device__ static void decode(const Raw& raw, float (&out)[1]) { out[0] = to_float(raw); }
    __device__ static Raw encode(const float (&in)[1]) { return Convert<T>::store(in[0]); }
};

template <class T>
struct Access<T, true> {
    static constexpr int kCount = 8;
    using Raw = Vec16;
    __device__ static void decode(const Raw& raw, float (&out)[8]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[2 * i] = to_float(T{static_cast<u16>(raw.word[i] & 0xffffu)});
            out[2 * i + 1] = to_float(T{static_cast<u16>(raw.word[i] >> 16)});
        }
    }
    __device__ static Raw encode(const float (&in)[8]) {
        Raw raw;
#pragma unroll
        for (int i = 0; i < 4; ++i) raw.word[i] = Convert<T>::pack(in[2 * i], in[2 * i + 1]);
        return raw;
    }
};

template <>
struct Access<float, true> {
    static constexpr int kCount = 4;
    using Raw = Vec16;
    __device__ static void decode(const Raw& raw, float (&out)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = float_of_bits(raw.word[i]);
    }
    __device__ static Raw encode(const float (&in)[4]) {
        Raw raw;
#pragma unroll
        for (int i = 0; i < 4; ++i) raw.word[i] = bits_of_float(in[i]);
        return raw;
    }
};

template <>
struct Access<float, false> {
    static constexpr int kCount = 1;
    using Raw = float;
    __device__ static void decode(const Raw& raw, float (&out)[1]) { out[0] = raw; }
    __device__ static Raw encode(const float (&in)[1]) { return in[0]; }
};

// The part of the matrix that a thread works on: one row, every `stride`-th access from `column` on.
// A block of kRowThreads threads covers kRowThreads >> lanes_log2 rows; grid.y cuts the columns.
struct RowShare {
    i64 row;
    i64 column;
    i64 stride;
};

__device__ __forceinline__ RowShare row_share(int lanes_log2) {
    const int lanes = 1 << lanes_log2;
    const i64 block_rows = kRowThreads >> lanes_log2;
    RowShare share;
    share.row = static_cast<i64>(blockIdx.x) * block_rows + (threadIdx.x >> lanes_log2);
    share.column = static_cast<i64>(blockIdx.y) * lanes + (threadIdx.x & (lanes - 1));
    share.stride = static_cast<i64>(gridDim.y) * lanes;
    return share;
}

}  // namespace cupy_gmm
