// What the warps of a pingpong CTA do besides the product: hand out bundles tile by tile, load both sides, take turns.
//
// Barriers are named as in roles.cuh; turn[w] lets warpgroup w begin its product. A tile's description says where in
// the rings its stages begin, so that no thread has to follow the tiles of the other warpgroup.
#pragma once

#include "../params.cuh"
#include "../pipeline.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/misc.cuh"
#include "../ptx/warpgroup.cuh"
#include "bundles.cuh"
#include "config.cuh"
#include "ragged.cuh"
#include "roles.cuh"

namespace cupy_gmm {

struct PingpongTile {
    i32 group;  // local; -1 when no tile is left
    i32 first_row;
    i32 end_row;
    i32 row;  // of c, where the tile begins
    i32 col;
    i32 cols;  // that are computed
    i32 m_slot;
    u32 m_phase;
    i32 n_slot;
    u32 n_phase;
    i32 nth;       // of its bundle
    i32 arrivals;  // of each warp at a consumed stage of the n side; more than one: the tile ends its bundle
    i32 piece;     // of `pieces`
    i32 pieces;
    i32 slot;  // its first piece, counted in tiles

    __device__ __forceinline__ bool ended() const { return group < 0; }
    __device__ __forceinline__ int rows() const { return end_row - first_row; }
    __device__ __forceinline__ int steps() const { return (end_row - first_row + kTileK - 1) / kTileK; }
};

template <PingpongConfig kCfg>
struct PingpongBarriers {
    PingpongStorage<kCfg, PingpongTile>& storage;

    __device__ u32 m_loaded(int slot) const { return shared_address(&storage.m_loaded[slot]); }
    __device__ u32 m_consumed(int slot) const { return shared_address(&storage.m_consumed[slot]); }
    __device__ u32 n_loaded(int slot) const { return shared_address(&storage.n_loaded[slot]); }
    __device__ u32 n_consumed(int slot) const { return shared_address(&storage.n_consumed[slot]); }
    __device__ u32 announced(int slot) const { return shared_address(&storage.announced[slot]); }
    __device__ u32 forgotten(int slot) const { return shared_address(&storage.forgotten[slot]); }
    __device__ u32 claim() const { return shared_address(&storage.claim); }
    __device__ u32 turn(int warpgroup) const { return shared_address(&storage.turn[warpgroup]); }

    // One lane of each of the four warps of a warpgroup arrives.
    __device__ void init() const {
        for (int s = 0; s < kCfg.m_stages; ++s) {
            mbarrier_init(m_loaded(s), 1);
            mbarrier_init(m_consumed(s), 4);
        }
        for (int s = 0; s < kCfg.n_stages; ++s) {
            mbarrier_init(n_loaded(s), 1);
            mbarrier_init(n_consumed(s), 4 * (kCfg.bundle + 1));  // see arrivals_of
        }
        for (int s = 0; s < kPingpongSlots; ++s) {
            mbarrier_init(announced(s), 1);
            mbarrier_init(forgotten(s), 2 * 32 + 128);  // all that read it
        }
        mbarrier_init(claim(), 1);
        for (int w = 0; w < 2; ++w) mbarrier_init(turn(w), 4);
        fence_mbarrier_init();
    }

    // Every tile of a bundle arrives once a warp, its last one also for the tiles that a full bundle would have had.
    __device__ static i32 arrivals_of(int nth, int count) { return nth + 1 < count ? 1 : kCfg.bundle - count + 2; }
};

// Which CTAs begin with the longest groups, spread evenly over the grid, and which tickets they take. The counter holds
// those handed out later, from the front in its lower half and from the back in its upper one.
struct TwoEnds {
    u32 front;
    u32 back;
    u32 own;  // how many CTAs before this one begin at its end
    u32 total;
    i32 from_back;

    __device__ static TwoEnds of(u32 total, u32 front) {
        const u32 back = gridDim.x - front;
        const u32 backs_before = static_cast<u32>(static_cast<u64>(blockIdx.x) * back / gridDim.x);
        const bool from_back = static_cast<u32>(static_cast<u64>(blockIdx.x + 1) * back / gridDim.x) > backs_before;
        return {front, back, from_back ? backs_before : blockIdx.x - backs_before, total, from_back};
    }

    // The first ticket, and whether there is one: the front takes precedence where both ends overlap.
    __device__ bool first(u32& ticket) const {
        ticket = own;
        return own + (from_back != 0 ? front : 0u) < total;
    }
    __device__ bool next(const Params& p, u32& ticket) const {
        const u64 taken = atomic_add(reinterpret_cast<u64*>(p.tickets), from_back != 0 ? 1ull << 32 : 1ull);
        const u32 front_taken = front + static_cast<u32>(taken);
        const u32 back_taken = back + static_cast<u32>(taken >> 32);
        ticket = from_back != 0 ? back_taken : front_taken;
        const u64 both = static_cast<u64>(front_taken) + back_taken;
        // Every CTA that had a ticket asks for one too many: the last of those leaves the counter as the launch found
        // it.
        if (both + 1 == static_cast<u64>(total) + gridDim.x) *reinterpret_cast<u64*>(p.tickets) = 0;
        return both < total;
    }
};

// One whole warp takes tickets and announces the tiles of their bundles, in turn for either warpgroup.
template <PingpongConfig kCfg>
__device__ void announce_bundles(const Params& p, const PingpongBarriers<kCfg>& barriers, const TwoEnds& ends,
                                 const BundleWalk<kCfg>& walk) {
    RingPosition<kPingpongSlots> at;
    RingPosition<kCfg.m_stages> m;
    RingPosition<kCfg.n_stages> n;
    const auto announce = [&]() -> PingpongTile& {
        wait_for(barriers.forgotten(at.slot), at.phase ^ 1);
        return barriers.storage.tile[at.slot];
    };
    u32 ticket;
    i32 valid = ends.first(ticket);
    for (u32 turn = 0;; ++turn) {
        if (turn > 0) {
            if (lane_id() == 0) {
                wait_for(barriers.claim(), (turn - 1) & 1);
                valid = ends.next(p, ticket);
            }
            ticket = warp_shfl(ticket, 0);
            valid = warp_shfl(valid, 0);
        }
        if (valid != 0) walk.find(ticket);
        const Bundle& bundle = walk.window.bundle;
        if (valid == 0 || bundle.group < 0) break;
        if (lane_id() == 0) {
            const int steps = (bundle.end_row - bundle.first_row + kTileK - 1) / kTileK;
            for (int nth = 0; nth < bundle.count; ++nth) {
                PingpongTile& tile = announce();
                tile = {bundle.group,
                        bundle.first_row,
                        bundle.end_row,
                        bundle.row + nth * kCfg.m,
                        bundle.col,
                        bundle.cols,
                        m.slot,
                        m.phase,
                        n.slot,
                        n.phase,
                        nth,
                        barriers.arrivals_of(nth, bundle.count),
                        bundle.piece,
                        bundle.pieces,
                        bundle.slot};
                mbarrier_arrive(barriers.announced(at.slot));
                at.advance();
                m.advance_by(steps);
            }
            n.advance_by(steps);
        }
        warp_sync();
    }
    if (lane_id() == 0) {
        for (int w = 0; w < 2; ++w) {  // one for each warpgroup
            announce().group = -1;
            mbarrier_arrive(barriers.announced(at.slot));
            at.advance();
        }
    }
}

// A loading warp, of which one lane loads: with the others at its side the compiler knows that all it computes is alike
// in the warp. body(tile) for every tile.
template <PingpongConfig kCfg, class Body>
__device__ __forceinline__ void for_each_announced(const PingpongBarriers<kCfg>& barriers, const Body& body) {
    for (RingPosition<kPingpongSlots> at;; at.advance()) {
        wait_for(barriers.announced(at.slot), at.phase);
        const PingpongTile tile = barriers.storage.tile[at.slot];
        mbarrier_arrive(barriers.forgotten(at.slot));
        if (tile.ended()) return;
        body(tile);
    }
}

// The loading warp of the m side: every stage of every tile. It also says when the next ticket is due. What a copy
// needs is known before its stage is free.
template <PingpongConfig kCfg>
__device__ void load_m_side(const PingpongParams& h, const PingpongBarriers<kCfg>& barriers) {
    const bool whole = (h.p.flags & kWholeColumnBlocks) != 0;
    RingPosition<kCfg.m_stages> ring;
    for_each_announced(barriers, [&](const PingpongTile& tile) {
        const int steps = tile.steps();
        const int claim_at = tile.arrivals == 1 ? -1 : steps > kClaimAhead ? steps - kClaimAhead : 0;
        if (claim_at >= 0 && steps == 0 && lane_id() == 0) mbarrier_arrive(barriers.claim());
        i32 before_end = -tile.rows();
        for (int step = 0; step < steps; ++step) {
            if (step == claim_at && lane_id() == 0) mbarrier_arrive(barriers.claim());
            const u32 target = shared_address(barriers.storage.m_stage[ring.slot]);
            const u32 loaded = barriers.m_loaded(ring.slot);
            wait_for(barriers.m_consumed(ring.slot), ring.phase ^ 1);
            warp_sync();  // all lanes have seen the place free: once filled, two phases are told apart no more
            if (lane_id() == 0) {
                load_columns(target, &h.a, loaded, whole, kCfg.m, tile.row, before_end, tile.end_row);
            }
            before_end += kTileK;
            ring.advance();
        }
    });
}

// The loading warp of the n side: once a bundle.
template <PingpongConfig kCfg>
__device__ void load_n_side(const PingpongParams& h, const PingpongBarriers<kCfg>& barriers) {
    const bool whole = (h.p.flags & kWholeColumnBlocks) != 0;
    RingPosition<kCfg.n_stages> ring;
    for_each_announced(barriers, [&](const PingpongTile& tile) {
        if (tile.nth > 0) return;
        const TensorMap* const map = &h.b[tile.cols < kCfg.n ? 1 : 0];
        i32 before_end = -tile.rows();
        for (int step = 0; step < tile.steps(); ++step) {
            const u32 target = shared_address(barriers.storage.n_stage[ring.slot]);
            const u32 loaded = barriers.n_loaded(ring.slot);
            wait_for(barriers.n_consumed(ring.slot), ring.phase ^ 1);
            warp_sync();  // all lanes have seen the place free: once filled, two phases are told apart no more
            if (lane_id() == 0) {
                load_columns(target, map, loaded, whole, tile.cols, tile.col, before_end, tile.end_row);
            }
            before_end += kTileK;
            ring.advance();
        }
    });
}

}  // namespace cupy_gmm
