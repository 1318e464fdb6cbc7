// The product of one tile by one consumer warpgroup: 64 rows of the m side times up to n of the other, 64 k a stage.
// Every element is summed in rising k from 0, whatever the extents are: a token's bits do not depend on its group.
#pragma once

#include "../operand.cuh"
#include "../pipeline.cuh"
#include "../ptx/misc.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "config.cuh"
#include "roles.cuh"

namespace cupy_gmm {

// kMTransposed: the weights are MN-major in shared memory, in blocks of 64 k lines by 64 mn; tokens are K-major.
// kHalves: blocks of 64 rows that the warpgroup multiplies; the accumulators of each begin at a multiple of kMostN / 2.
// kHeld: the last stage of a tile is released only with the first one of the next: until then it serves as staging.
template <class T, bool kMTransposed, bool kHeld, int kMostN, int kHalves, class Ring, HopperRowsConfig kCfg>
struct HopperMainloop {
    // From one 16 k to the next, in descriptor units of 16 bytes: 16 lines, or 32 bytes along a line.
    static constexpr u64 kMStep = kMTransposed ? 16 * kLineBytes / 16 : 32 / 16;
    static constexpr u64 kNStep = 32 / 16;

    const Barriers<kCfg>& barriers;
    int warpgroup;
    int steps;
    StageExtent extent;

    // The extents of the n side that there are. perf: below 96 more of them gain nothing, and products with one half
    // are rarely short (bench/notes/0010-between-two-tiles.md).
    static constexpr int extent_after(int n) {
        if (kHalves == 2) return n + (n >= 96 ? 8 : n >= 32 ? 32 : 16);
        return n + (n >= 192 ? 16 : n == 16 ? 48 : 32);
    }
    static constexpr int nth_extent(int nth) {
        int n = 16;
        for (; nth > 0; --nth) n = extent_after(n);
        return n < kMostN ? n : kMostN;
    }
    static constexpr int extents() {
        int count = 1;
        while (nth_extent(count - 1) < kMostN) ++count;
        return count;
    }

    // The extent is chosen outside of the loop over k, among those from kFirst to kLast: the first that n fits.
    template <int kFirst = 0, int kLast = extents() - 1>
    __device__ __forceinline__ void run(float* acc, int n, Ring& ring) const {
        constexpr int kMiddle = (kFirst + kLast) / 2;
        if constexpr (kFirst == kLast) {
            loop<nth_extent(kFirst)>(acc, ring);
        } else if (n > nth_extent(kMiddle)) {
            run<kMiddle + 1, kLast>(acc, n, ring);
        } else {
            run<kFirst, kMiddle>(acc, n, ring);
        }
    }

    template <int kN>
    __device__ __forceinline__ void loop(float* acc, Ring& ring) const {
        const u32 mine = static_cast<u32>(warpgroup * kHalves * kBlockBytes);
        for (int step = 0; step < steps; ++step) {
            wait_for(barriers.loaded(ring.slot()), ring.phase());
            const u32 tokens = barriers.ring() + ring.place(extent) * kUnitBytes;
            const u32 weights = barriers.ring() + ring.weights * kUnitBytes;
            const u64 m = wgmma_descriptor(weights + mine, 0, 8 * kLineBytes);
            const u64 n = wgmma_descriptor(tokens, 0, 8 * kLineBytes);
            wgmma_fence();
#pragma unroll
            for (int k16 = 0; k16 < kTileK / 16; ++k16) {
#pragma unroll
                for (int half = 0; half < kHalves; ++half) {
                    Wgmma<T, kN, kMTransposed, false>::run(
                        acc + half * kMostN / 2, m + k16 * kMStep + half * (kBlockBytes / 16), n + k16 * kNStep);
                }
            }
            wgmma_commit();
            if (kHeld && step == 0) wait_for_stores();
            wgmma_wait<1>();
            if (kHeld || step > 0) release_one_before(ring);
            ring.advance(barriers.consumed(ring.slot()));
        }
        wgmma_wait<0>();
        if (!kHeld) release_one_before(ring);
    }

    // A tile without a product has one stage, which holds nothing.
    __device__ __forceinline__ void pass(Ring& ring) const {
        wait_for(barriers.loaded(ring.slot()), ring.phase());
        ring.place(extent);
        if (kHeld) {
            wait_for_stores();
            release_one_before(ring);
        }
        ring.advance(barriers.consumed(ring.slot()));
        if (!kHeld) release_one_before(ring);
    }

   private:
    // Of the tile before: they read its last stage, where its result was staged.
    __device__ __forceinline__ static void wait_for_stores() {
        if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
    }
    // It has been read: by products, or, where it was the last one of a tile, by stores.
    __device__ __forceinline__ static void release_one_before(const Ring& ring) {
        if (lane_id() == 0 && ring.before != 0) mbarrier_arrive(ring.before);
    }
};

}  // namespace cupy_gmm
