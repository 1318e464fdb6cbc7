// Forward and input gradient on Hopper: weights on the 64-row side of wgmma, tokens on its other side, so a row block
// of any multiple of 16 tokens costs just its tokens. One producer warpgroup (a thread each for w, x and the tickets),
// two consumer warpgroups of 64 weight columns each. Persistent. Instantiated by cupy_gmm/_variants.py.
#pragma once

#include "../operand.cuh"
#include "../params.cuh"
#include "../pipeline.cuh"
#include "../ptx/misc.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warpgroup.cuh"
#include "../tiles.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "mainloop.cuh"
#include "roles.cuh"

namespace cupy_gmm {

// Boxes of x: 64 k by 16, 64 or 256 rows; a row block takes as few as add up to its rounded length.
struct HopperParams {
    TensorMap w;
    TensorMap x16;
    TensorMap x64;
    TensorMap x256;
    Params p;
};
static_assert(sizeof(HopperParams) == 4 * 128 + 192, "mirrored by cupy_gmm/_tensormap.py");

__device__ __forceinline__ int rounded_tokens(int rows) { return (rows + 15) / 16 * 16; }

__device__ __forceinline__ int forward_steps(const Params& p, const RowTile& tile) {
    return tile.has_product(p.groups) ? (p.k + kTileK - 1) / kTileK : 0;
}

template <Layout kWLayout, HopperConfig kCfg>
__device__ void load_weights(const HopperParams& h, const Barriers<kCfg, RowTile>& barriers) {
    const auto steps = [&](const RowTile& tile) { return forward_steps(h.p, tile); };
    produce<true>(barriers, steps, [&](const RowTile& tile, int step, int slot) {
        const u32 target = shared_address(barriers.storage.stage[slot]);
        mbarrier_arrive_expect(barriers.loaded(slot), kCfg.m_bytes());
        if constexpr (kWLayout == Layout::kKMajor) {
            tma_load_3d(target, &h.w, barriers.loaded(slot), step * kTileK, tile.col, tile.group);
        } else {
            for (int block = 0; block < kCfg.m / 64; ++block) {
                tma_load_3d(target + block * 64 * kLineBytes, &h.w, barriers.loaded(slot), tile.col + block * 64,
                            step * kTileK, tile.group);
            }
        }
    });
}

template <HopperConfig kCfg>
__device__ void load_tokens(const HopperParams& h, const Barriers<kCfg, RowTile>& barriers) {
    const auto steps = [&](const RowTile& tile) { return forward_steps(h.p, tile); };
    produce<false>(barriers, steps, [&](const RowTile& tile, int step, int slot) {
        const int tokens = rounded_tokens(tile.rows);
        const int k = step * kTileK;
        const u32 target = shared_address(barriers.storage.stage[slot]) + kCfg.m_bytes();
        const u32 barrier = barriers.loaded(slot);
        mbarrier_arrive_expect(barrier, tokens * kLineBytes);
        if (tokens == 256) {
            tma_load_2d(target, &h.x256, barrier, k, tile.first_row);
            return;
        }
        int done = 0;
        for (; done + 64 <= tokens; done += 64) {
            tma_load_2d(target + done * kLineBytes, &h.x64, barrier, k, tile.first_row + done);
        }
        for (; done < tokens; done += 16) {
            tma_load_2d(target + done * kLineBytes, &h.x16, barrier, k, tile.first_row + done);
        }
    });
}

template <class T, Layout kWLayout, HopperConfig kCfg>
__device__ __forceinline__ void consume(const Params& p, const Barriers<kCfg, RowTile>& barriers, int warpgroup) {
    RingPosition<kCfg.stages> ring;
    RingPosition<kTileSlots> at;
    float acc[kCfg.n / 2];
    for (;; at.advance()) {
        const RowTile tile = receive_tile(barriers, at);
        if (tile.ended()) return;
#pragma unroll
        for (int i = 0; i < kCfg.n / 2; ++i) acc[i] = 0.0f;
        const HopperMainloop<T, kWLayout == Layout::kMnMajor, false, kCfg, RowTile> mainloop{barriers, warpgroup,
                                                                                             forward_steps(p, tile)};
        mainloop.run(acc, rounded_tokens(tile.rows), ring);
        const HopperEpilogue<kCfg> epilogue{p, barriers.storage.staged[warpgroup][0], warpgroup, tile};
        epilogue.run(acc);
    }
}

template <HopperConfig kCfg, class T, Layout kWLayout>
__device__ __forceinline__ void grouped_mm_sm90(const HopperParams& h) {
    static_assert(kCfg.legal(), "this HopperConfig cannot be built: see HopperConfig::legal");
    static_assert(sizeof(HopperStorage<kCfg, RowTile>) <= kCfg.shared_bytes(), "shared memory");
    alignas(1024) extern __shared__ char shared[];
    const Barriers<kCfg, RowTile> barriers{*reinterpret_cast<HopperStorage<kCfg, RowTile>*>(shared)};
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    if (threadIdx.x == 0) barriers.init();
    block_sync();
    if (warpgroup == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        const int warp = static_cast<int>(threadIdx.x) / 32;
        if (warp == 0 && lane_id() == 0) load_weights<kWLayout>(h, barriers);
        if (warp == 1 && lane_id() == 0) load_tokens(h, barriers);
        if (warp == 2) announce_tiles(h.p, barriers, RowTiles(h.p, kCfg.n, kCfg.m));
        if (warp == 3) report_status(h.p, 96);
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume<T, kWLayout>(h.p, barriers, warpgroup - 1);
    }
}

}  // namespace cupy_gmm
