// Forward and input gradient on Hopper: weights on the 64-row side of wgmma, tokens on its other side, so a row block
// costs just its tokens, rounded up to one of many extents. One producer warpgroup (a thread each for w, x, tickets),
// two consumer warpgroups of 64 weight columns each (narrow tile) or twice 64 (wide tile). Persistent. Instantiated by
// cupy_gmm/_variants.py.
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
#include "row_queue.cuh"

namespace cupy_gmm {

// Boxes for one copy an operand and stage: the fewer copies, the more of them the copy engine has in flight
// (bench/notes/0006-hopper-wide-tiles.md).
struct HopperParams {
    TensorMap w[2];   // for a narrow and a wide tile
    TensorMap x[16];  // 64 k by 16, 32, ... 256 rows
    TensorMap y;      // ragged, 64 columns by 64 rows; unused without Store::kBoxes
    Params p;
};
static_assert(sizeof(HopperParams) == 19 * 128 + 192, "mirrored by cupy_gmm/_tensormap.py");

template <HopperRowsConfig kCfg>
__device__ __forceinline__ int columns_of(const RowTile& tile) {
    return tile.cols > kCfg.narrow_columns() ? kCfg.columns : kCfg.narrow_columns();
}

// A tile without a product has one stage, which nothing is loaded into.
__device__ __forceinline__ int forward_steps(const Params& p, const RowTile& tile) {
    return tile.has_product(p.groups) ? (p.k + kTileK - 1) / kTileK : 1;
}

template <HopperRowsConfig kCfg>
__device__ __forceinline__ StageExtent stage_extent(const RowTile& tile) {
    return {static_cast<u32>(columns_of<kCfg>(tile)) / 16, static_cast<u32>(tile.rows + 15) / 16};
}

template <HopperRowsConfig kCfg, Store kStore>
inline constexpr int kRingUnits = kCfg.ring_units(staging_buffers(kStore));

template <Layout kWLayout, Store kStore, HopperRowsConfig kCfg>
__device__ void load_weights(const HopperParams& h, const Barriers<kCfg>& barriers) {
    const auto steps = [&](const RowTile& tile) { return forward_steps(h.p, tile); };
    const auto load = [&](const RowTile& tile, int step, u32 barrier, u32 target) {
        if (!tile.has_product(h.p.groups)) return mbarrier_arrive(barrier);
        const int columns = columns_of<kCfg>(tile);
        const TensorMap* map = &h.w[columns == kCfg.columns];
        mbarrier_arrive_expect(barrier, columns * kLineBytes);
        // perf: without a cache policy: copies with evict_normal are not merged with those of neighbouring SMs
        // (bench/notes/0009-what-an-sm-takes-in.md).
        if constexpr (kWLayout == Layout::kKMajor) {
            tma_load_3d(target, map, barrier, step * kTileK, tile.col, tile.group);
        } else if ((h.p.flags & kWholeColumnBlocks) != 0) {
            tma_load_4d(target, map, barrier, 0, step * kTileK, tile.col / 64, tile.group);
        } else {
#pragma unroll 1
            for (int done = 0; done < columns; done += 64) {
                tma_load_3d(target + done * kLineBytes, h.w, barrier, tile.col + done, step * kTileK, tile.group);
            }
        }
    };
    produce<true, kRingUnits<kCfg, kStore>>(barriers, steps, stage_extent<kCfg>, load);
}

template <Store kStore, HopperRowsConfig kCfg>
__device__ void load_tokens(const HopperParams& h, const Barriers<kCfg>& barriers) {
    const auto steps = [&](const RowTile& tile) { return forward_steps(h.p, tile); };
    const auto load = [&](const RowTile& tile, int step, u32 barrier, u32 target) {
        if (!tile.has_product(h.p.groups)) return mbarrier_arrive(barrier);
        const int sixteens = (tile.rows + 15) / 16;
        mbarrier_arrive_expect(barrier, sixteens * 16 * kLineBytes);
        tma_load_2d(target, &h.x[sixteens - 1], barrier, step * kTileK, tile.first_row);
    };
    produce<false, kRingUnits<kCfg, kStore>>(barriers, steps, stage_extent<kCfg>, load);
}

// Multiplies a tile, calls between() and stores it. kHalves: how many times 64 columns each warpgroup multiplies.
template <class T, Layout kWLayout, Store kStore, int kHalves, int kTokens, class Between, class Ring,
          HopperRowsConfig kCfg>
__device__ __forceinline__ void consume_tile(const HopperParams& h, const Barriers<kCfg>& barriers, int warpgroup,
                                             const RowTile& tile, const Between& between, float* acc, Ring& ring) {
    constexpr bool kHeld = kStore == Store::kBoxes;
#pragma unroll
    for (int i = 0; i < kHalves * kTokens / 2; ++i) acc[i] = plain_zero();
    const HopperMainloop<T, kWLayout == Layout::kMnMajor, kHeld, kTokens, kHalves, Ring, kCfg> mainloop{
        barriers, warpgroup, forward_steps(h.p, tile), stage_extent<kCfg>(tile)};
    if (tile.has_product(h.p.groups)) {
        mainloop.run(acc, tile.rows, ring);
    } else {
        mainloop.pass(ring);
    }
    between();
    auto& units = barriers.storage.units;
    char* const staged = units[kRingUnits<kCfg, kStore>] + warpgroup * staging_buffers(kStore) * kStagedBytes;
    // Of the held stage, the weights that only this warpgroup has read.
    char* const held = units[ring.weights] + warpgroup * kHalves * kBlockBytes;
    const HopperEpilogue<T, kStore, kHalves, kTokens> epilogue{&h.y, h.p, staged, held, warpgroup, tile};
    epilogue.run(acc);
}

template <class T, Layout kWLayout, Store kStore, HopperRowsConfig kCfg>
__device__ __forceinline__ void consume(const HopperParams& h, const Barriers<kCfg>& barriers, int warpgroup) {
    StageRing<kRingUnits<kCfg, kStore>> ring;
    float acc[kCfg.accumulators()];
    const auto consume_any = [&](const RowTile& tile, const auto& between) {
        if (tile.cols > kCfg.narrow_columns()) {
            consume_tile<T, kWLayout, kStore, 2, kCfg.wide_tokens>(h, barriers, warpgroup, tile, between, acc, ring);
        } else {
            consume_tile<T, kWLayout, kStore, 1, kCfg.tokens>(h, barriers, warpgroup, tile, between, acc, ring);
        }
    };
    if constexpr (kStore == Store::kBoxes) {
        // perf: the next tile is read before this one is stored, and what follows the stores waits for nothing
        // (bench/notes/0010-between-two-tiles.md).
        RowTile tile = take_tile(barriers, TileSlot(0));
        for (u32 nth = 1; !tile.ended(); ++nth) {
            RowTile next;
            consume_any(tile, [&] { next = take_tile(barriers, TileSlot(nth)); });
            tile = next;
        }
        tma_store_wait<0>();  // shared memory is read to the end
    } else {
        // A tile is read where it stands: there is no register to spare.
        for (u32 nth = 0;; ++nth) {
            const RowTile& tile = await_tile(barriers, TileSlot(nth));
            if (tile.ended()) break;
            consume_any(tile, [] {});
            forget_tile(barriers, TileSlot(nth));
        }
    }
}

template <HopperRowsConfig kCfg, class T, Layout kWLayout, Store kStore>
__device__ __forceinline__ void grouped_mm_sm90(const HopperParams& h) {
    static_assert(kCfg.legal(), "this HopperRowsConfig cannot be built: see HopperRowsConfig::legal");
    static_assert(sizeof(HopperStorage<kCfg, RowTile>) <= kCfg.shared_bytes(), "shared memory");
    alignas(1024) extern __shared__ char shared[];
    const Barriers<kCfg> barriers{*reinterpret_cast<HopperStorage<kCfg, RowTile>*>(shared)};
    const int warp = warp_shfl(static_cast<int>(threadIdx.x) / 32, 0);  // so that the compiler knows: alike in the warp
    const int warpgroup = warp / 4;
    if (threadIdx.x == 0) barriers.init();
    const RowQueue<kCfg> queue{h.p, *reinterpret_cast<RowTicket*>(barriers.storage.scratch)};
    // The thread that announces: it reads the table meanwhile. Named by warp and lane, it makes the compiler spill.
    if (threadIdx.x == 64) {
        queue.begin();
        queue.describe(barriers.storage.tile[0]);
    }
    block_sync();
    if (warpgroup == 0) {
        setmaxnreg_dec<kCfg.producer_registers()>();
        if (warp == 0 && lane_id() == 0) load_weights<kWLayout, kStore>(h, barriers);
        if (warp == 1 && lane_id() == 0) load_tokens<kStore>(h, barriers);
        if (warp == 2 && lane_id() == 0) announce_queue(barriers, queue);
        if (warp == 3) report_status(h.p, 96);
    } else {
        setmaxnreg_inc<kCfg.consumer_registers()>();
        consume<T, kWLayout, kStore>(h, barriers, warpgroup - 1);
    }
}

}  // namespace cupy_gmm
