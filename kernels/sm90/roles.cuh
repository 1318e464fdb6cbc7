// What the warps of a Hopper CTA do besides the product: hand out tiles, load, receive. Used by both Hopper kernels.
//
// Barriers are named by the state that they announce: loaded (a stage holds data), consumed (a stage may be filled),
// announced (a tile is described), forgotten (its description may be overwritten), claim (take the next ticket).
#pragma once

#include "../params.cuh"
#include "../pipeline.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/misc.cuh"
#include "config.cuh"

namespace cupy_gmm {

// perf: stages before the end of a tile's loads at which the next ticket is taken; 2 to 12 are alike
// (bench/notes/0003-hopper-forward.md).
inline constexpr int kClaimAhead = 6;

template <HopperConfig kCfg, class Tile>
struct Barriers {
    HopperStorage<kCfg, Tile>& storage;

    __device__ u32 loaded(int slot) const { return shared_address(&storage.loaded[slot]); }
    __device__ u32 consumed(int slot) const { return shared_address(&storage.consumed[slot]); }
    __device__ u32 announced(int slot) const { return shared_address(&storage.announced[slot]); }
    __device__ u32 forgotten(int slot) const { return shared_address(&storage.forgotten[slot]); }
    __device__ u32 claim() const { return shared_address(&storage.claim); }

    __device__ void init() const {
        for (int s = 0; s < kCfg.stages; ++s) {
            mbarrier_init(loaded(s), 2);                       // the two loading threads
            mbarrier_init(consumed(s), 4 * kCfg.consumers());  // one lane of each consumer warp
        }
        for (int s = 0; s < kTileSlots; ++s) {
            mbarrier_init(announced(s), 1);
            mbarrier_init(forgotten(s), 2 + 4 * kCfg.consumers());
        }
        mbarrier_init(claim(), 1);
        fence_mbarrier_init();
    }
};

// One whole warp takes tickets and announces tiles. tiles.at(ticket) -> Tile, called by all lanes.
template <HopperConfig kCfg, class Tile, class Tiles>
__device__ void announce_tiles(const Params& p, const Barriers<kCfg, Tile>& barriers, const Tiles& tiles) {
    i32 ticket = static_cast<i32>(blockIdx.x);
    RingPosition<kTileSlots> at;
    for (u32 turn = 0;; ++turn) {
        if (turn > 0) {
            if (lane_id() == 0) {
                wait_for(barriers.claim(), (turn - 1) & 1);
                ticket = atomic_add(p.tickets, 1) + static_cast<i32>(gridDim.x);
            }
            ticket = warp_shfl(ticket, 0);
        }
        const Tile tile = tiles.at(ticket);
        if (lane_id() == 0) {
            wait_for(barriers.forgotten(at.slot), at.phase ^ 1);
            barriers.storage.tile[at.slot] = tile;
            mbarrier_arrive(barriers.announced(at.slot));
        }
        if (tile.ended()) return;
        at.advance();
    }
}

// A loading thread: body(tile, step, slot) for each of steps_of(tile) stages of every tile. One of the two claims.
template <bool kClaims, HopperConfig kCfg, class Tile, class Steps, class Body>
__device__ __forceinline__ void produce(const Barriers<kCfg, Tile>& barriers, const Steps& steps_of, const Body& body) {
    RingPosition<kCfg.stages> ring;
    RingPosition<kTileSlots> at;
    for (;; at.advance()) {
        wait_for(barriers.announced(at.slot), at.phase);
        const Tile tile = barriers.storage.tile[at.slot];
        mbarrier_arrive(barriers.forgotten(at.slot));
        if (tile.ended()) return;
        const int steps = steps_of(tile);
        const int claim_at = steps > kClaimAhead ? steps - kClaimAhead : 0;
        if (kClaims && steps == 0) mbarrier_arrive(barriers.claim());
        for (int step = 0; step < steps; ++step) {
            if (kClaims && step == claim_at) mbarrier_arrive(barriers.claim());
            wait_for(barriers.consumed(ring.slot), ring.phase ^ 1);
            body(tile, step, ring.slot);
            ring.advance();
        }
    }
}

// A consumer warp: one lane reads the announced tile and lets go of it; the others hear of it from that lane.
template <HopperConfig kCfg, class Tile>
__device__ __forceinline__ Tile receive_tile(const Barriers<kCfg, Tile>& barriers, const RingPosition<kTileSlots>& at) {
    Tile tile{};
    if (lane_id() == 0) {
        wait_for(barriers.announced(at.slot), at.phase);
        tile = barriers.storage.tile[at.slot];
        mbarrier_arrive(barriers.forgotten(at.slot));
    }
    i32* words = reinterpret_cast<i32*>(&tile);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Tile) / 4); ++i) words[i] = warp_shfl(words[i], 0);
    return tile;
}

}  // namespace cupy_gmm
