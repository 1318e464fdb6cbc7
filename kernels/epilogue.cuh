// Accumulators -> global memory on the portable path. Called by the product kernels after the main loop, whose shared
// memory it takes over; knows nothing of groups.
//
// The tile is staged in shared memory as float32 and leaves in chunks of eight columns, so that stores are 16 bytes
// wide and the code for every output type and stride is one small loop.
#pragma once

#include "config.cuh"
#include "params.cuh"
#include "ptx/memory.cuh"
#include "ptx/misc.cuh"
#include "sm80/mainloop.cuh"
#include "stores.cuh"

namespace cupy_gmm {

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

// Calls body(row, chunk index) for every chunk of the tile's first `rows` rows and `cols` columns, spread over the
// block.
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
template <TileConfig kCfg, class Source>
__device__ __forceinline__ void store(const Params& p, i64 group, i64 row, i64 col, int rows, int cols,
                                      const Source& source) {
    with_target(p, group, row, col, [&](const auto& target) {
        for_each_chunk<kCfg>(rows, cols,
                             [&](int r, int chunk) { store_chunk(target, r, chunk * 8, source(r, chunk)); });
    });
}

}  // namespace cupy_gmm
