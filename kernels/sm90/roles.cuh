// What the warps of the forward kernel do besides the product: hand out tiles, load, receive.
//
// Barriers are named by the state that they announce: loaded (a stage holds data), consumed (a stage may be filled),
// announced (a tile is described), forgotten (its description may be overwritten), claim (take the next ticket).
#pragma once

#include "../params.cuh"
#include "../pipeline.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/misc.cuh"
#include "../tiles.cuh"
#include "config.cuh"
#include "stage_ring.cuh"

namespace cupy_gmm {

// perf: stages before the end of a tile's loads at which the next ticket is taken; 2 to 12 are alike
// (bench/notes/0003-hopper-forward.md).
inline constexpr int kClaimAhead = 6;

// Where the nth tile of a CTA is announced; one register where RingPosition takes two.
struct TileSlot {
    u32 nth;
    __device__ explicit TileSlot(u32 nth_) : nth(nth_) {}
    __device__ int slot() const { return static_cast<int>(nth % kTileSlots); }
    __device__ u32 phase() const { return nth / kTileSlots & 1; }
};

template <HopperRowsConfig kCfg>
struct Barriers {
    HopperStorage<kCfg, RowTile>& storage;

    __device__ u32 ring() const { return shared_address(storage.units); }
    __device__ u32 loaded(int slot) const { return shared_address(&storage.loaded[slot]); }
    __device__ u32 consumed(int slot) const { return shared_address(&storage.consumed[slot]); }
    __device__ u32 announced(int slot) const { return shared_address(&storage.announced[slot]); }
    __device__ u32 forgotten(int slot) const { return shared_address(&storage.forgotten[slot]); }
    __device__ u32 claim() const { return shared_address(&storage.claim); }

    __device__ void init() const {
        for (int s = 0; s < kStageSlots; ++s) {
            mbarrier_init(loaded(s), 2);                       // the two loading threads
            mbarrier_init(consumed(s), 4 * kCfg.consumers());  // one lane of each consumer warp
        }
        for (int s = 0; s < kTileSlots; ++s) {
            mbarrier_init(announced(s), 1);
            mbarrier_init(forgotten(s), 2 + 128 * kCfg.consumers());  // all that read it
        }
        mbarrier_init(claim(), 1);
        fence_mbarrier_init();
    }
};

// One thread takes tickets and announces tiles: queue.claim() and describe(tile), which has no rows if there is nothing
// to do. The first one is described already.
template <HopperRowsConfig kCfg, class Queue>
__device__ void announce_queue(const Barriers<kCfg>& barriers, const Queue& queue) {
    u32& nth = queue.mine.announced;
    for (nth = 0;;) {
        const RowTile& tile = barriers.storage.tile[TileSlot(nth).slot()];
        if (tile.rows != 0) {
            const bool ended = tile.ended();
            mbarrier_arrive(barriers.announced(TileSlot(nth).slot()));
            if (ended) return;
            wait_for(barriers.claim(), nth & 1);
            ++nth;
            wait_for(barriers.forgotten(TileSlot(nth).slot()), TileSlot(nth).phase() ^ 1);
        }
        queue.claim();
        queue.describe(barriers.storage.tile[TileSlot(nth).slot()]);
    }
}

// A loading thread: body(tile, step, barrier, address) for each of steps_of(tile) stages of every tile, one at
// least, of extent_of(tile) each. The one for the weights claims.
template <bool kWeights, int kUnits, HopperRowsConfig kCfg, class Steps, class Extent, class Body>
__device__ __forceinline__ void produce(const Barriers<kCfg>& barriers, const Steps& steps_of, const Extent& extent_of,
                                        const Body& body) {
    LoadState& state = barriers.storage.loading[kWeights];
    LoadRing<kWeights, kUnits> ring(state.starts);
    for (state.tiles = 0;; ++state.tiles) {
        const TileSlot at(state.tiles);
        wait_for(barriers.announced(at.slot()), at.phase());
        const RowTile tile = barriers.storage.tile[at.slot()];
        mbarrier_arrive(barriers.forgotten(at.slot()));
        if (tile.ended()) return;
        const int steps = steps_of(tile);
        const int claim_at = steps > kClaimAhead ? steps - kClaimAhead : 0;
        const StageExtent extent = extent_of(tile);
        ring.plan(extent);
        for (int step = 0; step < steps; ++step) {
            if (kWeights && step == claim_at) mbarrier_arrive(barriers.claim());
            ring.acquire([&](int slot) { return barriers.consumed(slot); });
            body(tile, step, barriers.loaded(ring.slot()), barriers.ring() + ring.target * kUnitBytes);
            ring.filled();
            if (step + 1 < steps) ring.plan(extent);
        }
    }
}

// A consumer thread: the announced tile, to be read where it stands until `forget_tile`.
template <HopperRowsConfig kCfg>
__device__ __forceinline__ const RowTile& await_tile(const Barriers<kCfg>& barriers, const TileSlot& at) {
    wait_for(barriers.announced(at.slot()), at.phase());
    return barriers.storage.tile[at.slot()];
}

// Every thread for itself, after it has read the tile: an arrival speaks for nobody else's reads.
template <HopperRowsConfig kCfg>
__device__ __forceinline__ void forget_tile(const Barriers<kCfg>& barriers, const TileSlot& at) {
    mbarrier_arrive(barriers.forgotten(at.slot()));
}

// Both at once.
template <HopperRowsConfig kCfg>
__device__ __forceinline__ RowTile take_tile(const Barriers<kCfg>& barriers, const TileSlot& at) {
    const RowTile tile = await_tile(barriers, at);
    forget_tile(barriers, at);
    return tile;
}

}  // namespace cupy_gmm
