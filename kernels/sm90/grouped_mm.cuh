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
#include "config.cuh"
#include "epilogue.cuh"
#include "mainloop.cuh"

namespace cupy_gmm {

// Boxes of x: 64 k by 16, 64 or 256 rows; a row block takes as few as add up to its rounded length.
struct HopperParams {
    TensorMap w;
    TensorMap x16;
    TensorMap x64;
    TensorMap x256;
    Params p;
};
static_assert(sizeof(HopperParams) == 4 * 128 + 192, "mirrored by cupy_gmm/_params.py");

inline constexpr int kClaimAhead = 6;  // stages before the end of a tile's loads at which the next ticket is taken

template <HopperConfig kCfg>
struct Barriers {
    HopperStorage<kCfg>& storage;

    __device__ u32 loaded(int slot) const { return shared_address(&storage.loaded[slot]); }
    __device__ u32 consumed(int slot) const { return shared_address(&storage.consumed[slot]); }
    __device__ u32 announced(int slot) const { return shared_address(&storage.announced[slot]); }
    __device__ u32 forgotten(int slot) const { return shared_address(&storage.forgotten[slot]); }
    __device__ u32 claim() const { return shared_address(&storage.claim); }

    __device__ void init() const {
        for (int s = 0; s < kCfg.stages; ++s) {
            mbarrier_init(loaded(s), 2);                       // the threads of w and x
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

// The thread that takes tickets and announces tiles, two ahead at most.
template <HopperConfig kCfg>
__device__ void announce_tiles(const Params& p, const Barriers<kCfg>& barriers) {
    const RowTiles tiles(p, kCfg.max_tokens, kCfg.columns);
    i32 ticket = static_cast<i32>(blockIdx.x);
    RingPosition<kTileSlots> at;
    for (u32 turn = 0;; ++turn) {
        if (turn > 0) {
            wait_for(barriers.claim(), (turn - 1) & 1);
            ticket = atomic_add(p.tickets, 1) + static_cast<i32>(gridDim.x);
        }
        const RowTile tile = tiles.at(ticket);
        wait_for(barriers.forgotten(at.slot), at.phase ^ 1);
        barriers.storage.tile[at.slot] = tile;
        mbarrier_arrive(barriers.announced(at.slot));
        if (tile.rows < 0) return;
        at.advance();
    }
}

// The threads that load: body(tile, ring position) for every 64 k of every tile with weights.
template <HopperConfig kCfg, bool kClaims, class Body>
__device__ __forceinline__ void produce(const Params& p, const Barriers<kCfg>& barriers, const Body& body) {
    const int steps = (p.k + kTileK - 1) / kTileK;
    RingPosition<kCfg.stages> ring;
    RingPosition<kTileSlots> at;
    for (;; at.advance()) {
        wait_for(barriers.announced(at.slot), at.phase);
        const RowTile tile = barriers.storage.tile[at.slot];
        mbarrier_arrive(barriers.forgotten(at.slot));
        if (tile.rows < 0) return;
        const int live = tile.has_product(p.groups) ? steps : 0;
        const int claim_at = live > kClaimAhead ? live - kClaimAhead : 0;
        if (kClaims && live == 0) mbarrier_arrive(barriers.claim());
        for (int step = 0; step < live; ++step) {
            if (kClaims && step == claim_at) mbarrier_arrive(barriers.claim());
            wait_for(barriers.consumed(ring.slot), ring.phase ^ 1);
            body(tile, step * kTileK, ring.slot);
            ring.advance();
        }
    }
}

template <HopperConfig kCfg, Layout kWLayout>
__device__ void load_weights(const HopperParams& h, const Barriers<kCfg>& barriers) {
    produce<kCfg, true>(h.p, barriers, [&](const RowTile& tile, int k, int slot) {
        const u32 target = shared_address(barriers.storage.stage[slot]);
        mbarrier_arrive_expect(barriers.loaded(slot), kCfg.w_bytes());
        if constexpr (kWLayout == Layout::kKMajor) {
            tma_load_3d(target, &h.w, barriers.loaded(slot), k, tile.col, tile.group);
        } else {
            for (int block = 0; block < kCfg.columns / 64; ++block) {
                tma_load_3d(target + block * 64 * kLineBytes, &h.w, barriers.loaded(slot), tile.col + block * 64, k,
                            tile.group);
            }
        }
    });
}

template <HopperConfig kCfg>
__device__ void load_tokens(const HopperParams& h, const Barriers<kCfg>& barriers) {
    produce<kCfg, false>(h.p, barriers, [&](const RowTile& tile, int k, int slot) {
        const int tokens = rounded_tokens(tile.rows);
        u32 target = shared_address(barriers.storage.stage[slot]) + kCfg.w_bytes();
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

// One lane reads the announced tile and lets go of it; the warp hears of it from that lane.
template <HopperConfig kCfg>
__device__ __forceinline__ RowTile receive_tile(const Barriers<kCfg>& barriers, const RingPosition<kTileSlots>& at) {
    RowTile tile{};
    if (lane_id() == 0) {
        wait_for(barriers.announced(at.slot), at.phase);
        tile = barriers.storage.tile[at.slot];
        mbarrier_arrive(barriers.forgotten(at.slot));
    }
    return {warp_shfl(tile.group, 0), warp_shfl(tile.first_row, 0), warp_shfl(tile.col, 0), warp_shfl(tile.rows, 0),
            warp_shfl(tile.cols, 0)};
}

template <HopperConfig kCfg, class T, Layout kWLayout>
__device__ __forceinline__ void consume(const Params& p, const Barriers<kCfg>& barriers, int warpgroup) {
    const int steps = (p.k + kTileK - 1) / kTileK;
    RingPosition<kCfg.stages> ring;
    RingPosition<kTileSlots> at;
    float acc[kCfg.max_tokens / 2];
    for (;; at.advance()) {
        const RowTile tile = receive_tile(barriers, at);
        if (tile.rows < 0) return;
#pragma unroll
        for (int i = 0; i < kCfg.max_tokens / 2; ++i) acc[i] = 0.0f;
        if (tile.has_product(p.groups)) {
            const HopperMainloop<kCfg, T, kWLayout> mainloop{barriers, warpgroup, steps};
            mainloop.run(acc, rounded_tokens(tile.rows), ring);
        }
        const HopperEpilogue<kCfg, T> epilogue{p, barriers.storage.staged[warpgroup][0], warpgroup, tile};
        epilogue.run(acc);
    }
}

template <HopperConfig kCfg, class T, Layout kWLayout>
__device__ __forceinline__ void grouped_mm_sm90(const HopperParams& h) {
    static_assert(kCfg.legal(), "this HopperConfig cannot be built: see HopperConfig::legal");
    static_assert(sizeof(HopperStorage<kCfg>) <= kCfg.shared_bytes() && kCfg.shared_bytes() <= 232448, "shared memory");
    alignas(1024) extern __shared__ char shared[];
    const Barriers<kCfg> barriers{*reinterpret_cast<HopperStorage<kCfg>*>(shared)};
    const int warpgroup = static_cast<int>(threadIdx.x) / 128;
    if (threadIdx.x == 0) barriers.init();
    block_sync();
    if (warpgroup == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        const int warp = static_cast<int>(threadIdx.x) / 32;
        if (lane_id() == 0) {
            if (warp == 0) load_weights<kCfg, kWLayout>(h, barriers);
            if (warp == 1) load_tokens<kCfg>(h, barriers);
            if (warp == 2) announce_tiles<kCfg>(h.p, barriers);
            if (warp == 3) report_status(h.p, 96);
        }
    } else {
        setmaxnreg_inc<kConsumerRegisters>();
        consume<kCfg, T, kWLayout>(h.p, barriers, warpgroup - 1);
    }
}

}  // namespace cupy_gmm
