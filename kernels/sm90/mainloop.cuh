// The product of one tile by one consumer warpgroup: 64 weight columns times n tokens, 64 k a stage.
// Every element is summed in rising k from 0, whatever n is: a token's bits do not depend on its group.
#pragma once

#include "../operand.cuh"
#include "../pipeline.cuh"
#include "../ptx/wgmma.cuh"
#include "config.cuh"

namespace cupy_gmm {

template <HopperConfig kCfg>
struct Barriers;

__device__ __forceinline__ int rounded_tokens(int rows) { return (rows + 15) / 16 * 16; }

template <HopperConfig kCfg, class T, Layout kWLayout>
struct HopperMainloop {
    static constexpr bool kTransposed = kWLayout == Layout::kMnMajor;
    // From one 16 k to the next: 32 bytes along a line, or 16 lines; in descriptor units of 16 bytes.
    static constexpr u64 kWStep = kTransposed ? 16 * kLineBytes / 16 : 32 / 16;
    static constexpr u64 kXStep = 32 / 16;

    const Barriers<kCfg>& barriers;
    int warpgroup;
    int steps;

    // The number of tokens is chosen outside of the loop over k.
    template <int kTokens = 16>
    __device__ __forceinline__ void run(float* acc, int tokens, RingPosition<kCfg.stages>& ring) const {
        if constexpr (kTokens < kCfg.max_tokens) {
            if (tokens > kTokens) {
                run<kTokens + 16>(acc, tokens, ring);
                return;
            }
        }
        loop<kTokens>(acc, ring);
    }

   private:
    template <int kTokens>
    __device__ __forceinline__ void loop(float* acc, RingPosition<kCfg.stages>& ring) const {
        u32 last = 0;
        for (int step = 0; step < steps; ++step) {
            wait_for(barriers.loaded(ring.slot), ring.phase);
            const u32 stage = shared_address(barriers.storage.stage[ring.slot]);
            const u64 w = wgmma_descriptor(stage + warpgroup * 64 * kLineBytes, 0, 8 * kLineBytes);
            const u64 x = wgmma_descriptor(stage + kCfg.w_bytes(), 0, 8 * kLineBytes);
            wgmma_fence();
#pragma unroll
            for (int k16 = 0; k16 < kTileK / 16; ++k16) {
                Wgmma<T, kTokens, kTransposed, 0>::run(acc, w + k16 * kWStep, x + k16 * kXStep);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0 && lane_id() == 0) mbarrier_arrive(last);  // the stage before has been read
            last = barriers.consumed(ring.slot);
            ring.advance();
        }
        wgmma_wait<0>();
        if (steps > 0 && lane_id() == 0) mbarrier_arrive(last);
    }
};

}  // namespace cupy_gmm
