// Accumulators -> global memory: any strides, bf16 / fp16 / fp32, partial tiles, optionally on top of what is there.
// Called by the product kernels after the main loop, whose shared memory it takes over; knows nothing of groups.
//
// The tile is staged in shared memory as float32 and leaves in chunks of eight columns, so that stores are 16 bytes
// wide and the code for every output type and stride is one small loop.
#pragma once

#include "config.cuh"
#include "params.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/misc.cuh"
#include "sm80/mainloop.cuh"

namespace cupy_gmm {

struct Chunk {  // eight neighbouring columns of one row
    Float4 half[2];

    __device__ __forceinline__ float at(int column) const { return half[column / 4].at[column % 4]; }
    __device__ __forceinline__ void add(const Chunk& other) {
#pragma unroll
        for (int i = 0; i < 8; ++i) half[i / 4].at[i % 4] += other.at(i);
    }
};

// The float32 tile in shared memory. A pitch of 8 words past a multiple of 32 spreads the rows of a fragment over all
// banks.
template <TileConfig kCfg>
struct StagedTile {
    static constexpr int kPitch = kCfg.tile_n + 8;
    static constexpr int kChunks = kCfg.tile_n / 8;
    static_assert(kCfg.tile_m * kPitch * 4 <= kCfg.shared_bytes(), "the staged tile lives in the pipeline's slots");

    float* base;

    __device__ void fill(const Accumulators<kCfg>& acc, int rows) const {
        const WarpPlace<kCfg> place = WarpPlace<kCfg>::here();
        const int slices = place.slices(rows);
        float* at = base + (place.row(0) + lane_id() / 4) * kPitch + place.column + 2 * (lane_id() % 4);
#pragma unroll
        for (int i = 0; i < kCfg.slices_m(); ++i) {
            if (i < slices) {
#pragma unroll
                for (int j = 0; j < kCfg.slices_n(); ++j) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float* pair = at + (i * kCfg.warps_m * 16 + half * 8) * kPitch + j * 8;
                        *reinterpret_cast<Float2*>(pair) = {acc.at[i][j][2 * half], acc.at[i][j][2 * half + 1]};
                    }
                }
            }
        }
        block_sync();
    }

    __device__ __forceinline__ Chunk chunk(int row, int chunk_index) const {
        const Float4* at = reinterpret_cast<const Float4*>(base + row * kPitch + chunk_index * 8);
        return {at[0], at[1]};
    }
};

// Element (0, 0) of the tile's place in c.
template <class Out>
struct Target {
    Out* base;
    i64 row_stride;
    i64 col_stride;
    int rows;
    int cols;
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

// Calls body(row, chunk index) for every chunk of the tile's first `rows` rows and `cols` columns, spread over the block.
template <TileConfig kCfg, class Body>
__device__ __forceinline__ void for_each_chunk(int rows, int cols, const Body& body) {
    const int chunks = (cols < kCfg.tile_n ? cols + 7 : kCfg.tile_n) / 8;
    const int total = (rows < kCfg.tile_m ? rows : kCfg.tile_m) * StagedTile<kCfg>::kChunks;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < total; i += kCfg.threads()) {
        const int chunk = i % StagedTile<kCfg>::kChunks;
        if (chunk < chunks) body(i / StagedTile<kCfg>::kChunks, chunk);
    }
}

// Stores source(row, chunk index) -> Chunk at element (row, col) of matrix `group` of c.
template <TileConfig kCfg, class Out, class Source>
__device__ __forceinline__ void store_as(const Params& p, i64 group, i64 row, i64 col, int rows, int cols,
                                         const Source& source) {
    const Target<Out> target{static_cast<Out*>(p.c) + group * p.c_group + row * p.c_row + col * p.c_col,
                             p.c_row,
                             p.c_col,
                             rows,
                             cols,
                             (p.flags & kVectorStore) != 0,
                             (p.flags & kAccumulate) != 0};
    for_each_chunk<kCfg>(rows, cols, [&](int r, int chunk) { store_chunk(target, r, chunk * 8, source(r, chunk)); });
}

template <TileConfig kCfg, class Source>
__device__ __forceinline__ void store(const Params& p, i64 group, i64 row, i64 col, int rows, int cols,
                                      const Source& source) {
    if (p.c_type == kOutBf16) {
        store_as<kCfg, bf16>(p, group, row, col, rows, cols, source);
    } else if (p.c_type == kOutFp16) {
        store_as<kCfg, fp16>(p, group, row, col, rows, cols, source);
    } else {
        store_as<kCfg, float>(p, group, row, col, rows, cols, source);
    }
}

}  // namespace cupy_gmm
