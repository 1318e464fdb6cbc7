// Eight columns at a time -> global memory: any strides, bf16 / fp16 / fp32, edges, optionally on top of what is there.
// Used by the epilogues of every path; knows nothing of tiles or groups.
#pragma once

#include "params.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"

namespace cupy_gmm {

struct Chunk {  // eight neighbouring columns of one row
    Float4 half[2];

    __device__ __forceinline__ float at(int column) const { return half[column / 4].at[column % 4]; }
    __device__ __forceinline__ void add(const Chunk& other) {
#pragma unroll
        for (int i = 0; i < 8; ++i) half[i / 4].at[i % 4] += other.at(i);
    }
};

// Element (0, 0) of the tile's place in c.
template <class Out>
struct Target {
    Out* base;
    i64 row_stride;
    i64 col_stride;
    int cols;         // of c from the tile's first on
    bool vector;      // unit column stride and 16-byte alignment throughout
    bool accumulate;  // add to what stands there, in float32, before the one rounding
};

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(bf16 value) { return Convert<bf16>::load(value); }
__device__ __forceinline__ float widen(fp16 value) { return Convert<fp16>::load(value); }

template <class Out>
__device__ __forceinline__ void store_vector(Out* to, Chunk chunk, bool accumulate) {
    if (accumulate) {
        const Vec16 old = *reinterpret_cast<const Vec16*>(to);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            chunk.half[i / 4].at[i % 4] += widen(Out{static_cast<u16>(old.word[i / 2] >> (16 * (i % 2)))});
        }
    }
    Vec16 packed;
#pragma unroll
    for (int i = 0; i < 4; ++i) packed.word[i] = Convert<Out>::pack(chunk.at(2 * i), chunk.at(2 * i + 1));
    *reinterpret_cast<Vec16*>(to) = packed;
}

__device__ __forceinline__ void store_vector(float* to, Chunk chunk, bool accumulate) {
    Float4* halves = reinterpret_cast<Float4*>(to);
    if (accumulate) chunk.add({halves[0], halves[1]});
    halves[0] = chunk.half[0];
    halves[1] = chunk.half[1];
}

__device__ __forceinline__ void store_element(float* to, float value) { *to = value; }
template <class Out>
__device__ __forceinline__ void store_element(Out* to, float value) {
    *to = Convert<Out>::store(value);
}

template <class Out>
__device__ __forceinline__ void store_chunk(const Target<Out>& target, int row, int col, const Chunk& chunk) {
    Out* to = target.base + row * target.row_stride + col * target.col_stride;
    if (target.vector && col + 8 <= target.cols) {
        store_vector(to, chunk, target.accumulate);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (col + i < target.cols) {
            Out* element = to + i * target.col_stride;
            store_element(element, target.accumulate ? widen(*element) + chunk.at(i) : chunk.at(i));
        }
    }
}

// Calls body(Target) with element (row, col) of matrix `group` of c, in the type that the caller asked for.
template <class Body>
__device__ __forceinline__ void with_target(const Params& p, i64 group, i64 row, i64 col, const Body& body) {
    const i64 first = group * p.c_group + row * p.c_row + col * p.c_col;
    const int cols = static_cast<int>(p.n - col);
    const bool vector = (p.flags & kVectorStore) != 0;
    const bool accumulate = (p.flags & kAccumulate) != 0;
    if (p.c_type == kOutBf16) {
        body(Target<bf16>{static_cast<bf16*>(p.c) + first, p.c_row, p.c_col, cols, vector, accumulate});
    } else if (p.c_type == kOutFp16) {
        body(Target<fp16>{static_cast<fp16*>(p.c) + first, p.c_row, p.c_col, cols, vector, accumulate});
    } else {
        body(Target<float>{static_cast<float*>(p.c) + first, p.c_row, p.c_col, cols, vector, accumulate});
    }
}

}  // namespace cupy_gmm
