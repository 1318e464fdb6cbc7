// Weight gradient on Hopper: c[g] = a[rows of g]^T b[rows of g], rows are the reduction axis. Both operands are
// MN-major; the copy engine itself cuts them at the group's last row. One producer warpgroup, two consumer warpgroups
// of 64 rows of c each; an empty group gets zeros, a long one is cut into pieces as in ../grouped_mm_wgrad.cuh.
// Instantiated by cupy_gmm/_variants.py.
#pragma once

#include "../operand.cuh"
#include "../params.cuh"
#include "../pipeline.cuh"
#include "../ptx/misc.cuh"
#include "../ptx/warpgroup.cuh"
#include "../tiles.cuh"
#include "config.cuh"
#include "mainloop.cuh"
#include "ragged.cuh"
#include "roles.cuh"
#include "wgrad_epilogue.cuh"

namespace cupy_gmm {

__device__ __forceinline__ int wgrad_steps(const GroupTile& tile) {
    return (tile.end_row - tile.first_row + kTileK - 1) / kTileK;
}

// Loads kColumns columns from `col` on of 64 rows a stage; kRight: they lie behind those of the other thread.
template <bool kRight, int kColumns, HopperConfig kCfg, class Column>
__device__ void load_rows(const TensorMap* map, const Barriers<kCfg, GroupTile>& barriers, const Column& column_of) {
    const auto steps = [](const GroupTile& tile) { return wgrad_steps(tile); };
    const auto blocks = [](const GroupTile&) { return static_cast<u32>(kCfg.stage_blocks()); };
    produce<!kRight>(barriers, steps, blocks, [&](const GroupTile& tile, int step, u32 barrier, u32 target) {
        load_boxes<kColumns>(target + (kRight ? kCfg.m * kLineBytes : 0), map, barrier, column_of(tile),
                             tile.first_row + step * kTileK, tile.end_row);
    });
}

template <class T, HopperConfig kCfg>
__device__ __forceinline__ void consume_rows(const Params& p, const Barriers<kCfg, GroupTile>& barriers,
                                             int warpgroup) {
    StageRing<kCfg.blocks()> ring;
    RingPosition<kTileSlots> at;
    float acc[kCfg.n / 2];
    for (;; at.advance()) {
        const GroupTile tile = receive_tile(barriers, at);
        if (tile.ended()) return;
#pragma unroll
        for (int i = 0; i < kCfg.n / 2; ++i) acc[i] = 0.0f;
        const HopperMainloop<T, true, true, kCfg.n, 1, kCfg, GroupTile> mainloop{barriers, warpgroup, wgrad_steps(tile),
                                                                                 kCfg.stage_blocks()};
        mainloop.template loop<kCfg.n>(acc, ring);
        if (tile.end_row > tile.first_row || (p.flags & kAccumulate) == 0) {
            const WgradEpilogue<kCfg> epilogue{p, barriers.storage.staged[warpgroup][0], warpgroup, tile};
            epilogue.run(acc);
        }
    }
}

template <HopperConfig kCfg, class T>
__device__ __forceinline__ void grouped_mm_wgrad_sm90(const HopperWgradParams& h) {
    using Storage = HopperStorage<kCfg, GroupTile>;
    static_assert(kCfg.legal(), "this HopperConfig cannot be built: see HopperConfig::legal");
    static_assert(sizeof(Storage) <= kCfg.shared_bytes() && sizeof(GroupWindow) <= kScratchBytes, "shared memory");
    alignas(1024) extern __shared__ char shared[];
    const Barriers<kCfg, GroupTile> barriers{*reinterpret_cast<Storage*>(shared)};
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    if (threadIdx.x == 0) barriers.init();
    block_sync();
    if (warpgroup == 0) {
        setmaxnreg_dec<kCfg.producer_registers()>();
        const int warp = static_cast<int>(threadIdx.x) / 32;
        if (warp == 0 && lane_id() == 0) {
            load_rows<false, kCfg.m>(&h.a, barriers,
                                     [&](const GroupTile& tile) { return place_of(h.p, tile, kCfg.m, kCfg.n).row; });
        }
        if (warp == 1 && lane_id() == 0) {
            load_rows<true, kCfg.n>(&h.b, barriers,
                                    [&](const GroupTile& tile) { return place_of(h.p, tile, kCfg.m, kCfg.n).col; });
        }
        if (warp == 2) {
            GroupWindow& window = *reinterpret_cast<GroupWindow*>(barriers.storage.scratch);
            const GroupTiles tiles{h.p, window, tiles_of_group(h.p, kCfg.m, kCfg.n)};
            tiles.begin();
            announce_tiles(h.p, barriers, tiles);
        }
        if (warp == 3) report_status(h.p, 96);
    } else {
        setmaxnreg_inc<kCfg.consumer_registers()>();
        consume_rows<T>(h.p, barriers, warpgroup - 1);
    }
}

}  // namespace cupy_gmm
