// Weight gradient on Hopper, two tiles in flight: c[g] = a[rows of g]^T b[rows of g]. One producer warpgroup (a warp
// each for a, b and the tickets), two consumer warpgroups that take tiles in turn: one multiplies while the
// other stores. Tiles of a bundle share the columns of b, which a short group loads once. An empty group gets zeros, a
// long one is cut into pieces as in ../grouped_mm_wgrad.cuh. Instantiated by cupy_gmm/_variants.py.
#pragma once

#include "../operand.cuh"
#include "../params.cuh"
#include "../pipeline.cuh"
#include "../ptx/misc.cuh"
#include "../ptx/warpgroup.cuh"
#include "../tiles.cuh"
#include "bundles.cuh"
#include "config.cuh"
#include "pingpong_epilogue.cuh"
#include "pingpong_mainloop.cuh"
#include "pingpong_roles.cuh"
#include "ragged.cuh"

namespace cupy_gmm {

// For the warp that hands out bundles.
template <PingpongConfig kCfg>
struct PingpongScratch {
    BundleWindow window;
    TwoEnds ends;
    alignas(8) Totals sums[kCfg.threads() / 32];
};

template <class T, PingpongConfig kCfg>
__device__ __forceinline__ void consume_in_turn(const PingpongParams& h, const PingpongBarriers<kCfg>& barriers,
                                                int warpgroup) {
    float acc[kCfg.m * kCfg.n / 128];
    for (u32 turn = 0;; ++turn) {
        const int slot = static_cast<int>(turn * 2 + warpgroup) % kPingpongSlots;
        wait_for(barriers.announced(slot), turn * 2 / kPingpongSlots & 1);
        const PingpongTile tile = barriers.storage.tile[slot];
        mbarrier_arrive(barriers.forgotten(slot));
        if (tile.ended()) return PingpongEpilogue<kCfg>::finish();
#pragma unroll
        for (int i = 0; i < kCfg.m * kCfg.n / 128; ++i) acc[i] = plain_zero();
        PingpongMainloop<T, kCfg> mainloop{barriers,
                                           warpgroup,
                                           tile.rows(),
                                           static_cast<u32>(tile.arrivals),
                                           {tile.m_slot, tile.m_phase},
                                           {tile.n_slot, tile.n_phase}};
        const bool whole = tile.cols == kCfg.n;
        wait_for(barriers.turn(warpgroup), (turn ^ warpgroup ^ 1) & 1);
        if (whole) {
            mainloop.template run<kCfg.n>(acc);
        } else {
            mainloop.template run<kNarrow>(acc);
        }
        const bool written = tile.rows() > 0 || (h.p.flags & kAccumulate) == 0;
        const PingpongEpilogue<kCfg> epilogue{h,
                                              barriers.storage.staged[warpgroup],
                                              barriers.storage.arrived[warpgroup],
                                              tile.group,
                                              tile.row,
                                              tile.col,
                                              tile.cols,
                                              tile.piece,
                                              tile.pieces,
                                              tile.slot};
        if (written) epilogue.run(acc);
    }
}

template <PingpongConfig kCfg>
__device__ void hand_out_bundles(const Params& p, const PingpongBarriers<kCfg>& barriers) {
    PingpongScratch<kCfg>& scratch = *reinterpret_cast<PingpongScratch<kCfg>*>(barriers.storage.scratch);
    Totals total{0, 0, 0, 0};
    for (const Totals& sum : scratch.sums) total = both(total, sum);
    const u32 tickets = total.tickets < kMostTickets ? static_cast<u32>(total.tickets) : kMostTickets;
    const i32 slots = total.slots < p.max_slots ? static_cast<i32>(total.slots) : p.max_slots;
    if (lane_id() == 0) scratch.ends = TwoEnds::of(tickets, front_ctas<kCfg>(p, gridDim.x, total));
    warp_sync();
    const BundleWalk<kCfg> walk{p, scratch.window, GroupCut<kCfg>{p}};
    walk.begin(scratch.ends.from_back != 0, slots);
    announce_bundles(p, barriers, scratch.ends, walk);
}

template <PingpongConfig kCfg, class T>
__device__ __forceinline__ void grouped_mm_wgrad_pingpong_sm90(const PingpongParams& h) {
    using Storage = PingpongStorage<kCfg, PingpongTile>;
    static_assert(kCfg.legal(), "this PingpongConfig cannot be built: see PingpongConfig::legal");
    static_assert(sizeof(Storage) <= kCfg.shared_bytes(), "shared memory");
    static_assert(sizeof(PingpongScratch<kCfg>) <= kPingpongScratchBytes, "shared memory");
    alignas(1024) extern __shared__ char shared[];
    const PingpongBarriers<kCfg> barriers{*reinterpret_cast<Storage*>(shared)};
    const int warp = warp_shfl(static_cast<int>(threadIdx.x) / 32, 0);  // so that the compiler knows: alike in the warp
    const int warpgroup = warp / 4;
    if (threadIdx.x == 0) barriers.init();
    const Totals sum = sum_groups<kCfg>(h.p);
    if (lane_id() == 0) reinterpret_cast<PingpongScratch<kCfg>*>(barriers.storage.scratch)->sums[warp] = sum;
    block_sync();
    if (warpgroup == 0) {
        setmaxnreg_dec<kCfg.producer_registers()>();
        if (warp == 0) load_m_side(h, barriers);
        if (warp == 1) load_n_side(h, barriers);
        if (warp == 2) hand_out_bundles(h.p, barriers);
        if (warp == 3) report_status(h.p, 96);
    } else {
        setmaxnreg_inc<kCfg.consumer_registers()>();
        consume_in_turn<T>(h, barriers, warpgroup - 1);
    }
}

}  // namespace cupy_gmm
