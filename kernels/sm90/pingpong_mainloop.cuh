// The product of one tile by one warpgroup that has the tensor cores to itself until it hands on the turn: both halves
// of the m side times the n side, 64 rows a stage, both operands MN-major. Every element is summed in rising rows from
// 0.
#pragma once

#include "../operand.cuh"
#include "../pipeline.cuh"
#include "../ptx/misc.cuh"
#include "../ptx/wgmma.cuh"
#include "config.cuh"
#include "pingpong_roles.cuh"

namespace cupy_gmm {

template <class T, PingpongConfig kCfg>
struct PingpongMainloop {
    static constexpr int kHalves = kCfg.m / 64;
    static constexpr int kHalf = kCfg.n / 2;  // accumulators of one half
    static constexpr int kBlockBytes = 64 * kLineBytes;
    static constexpr u64 kStep = 16 * kLineBytes / 16;  // from one 16 rows to the next, in units of a descriptor
    static constexpr u64 kNextHalf = kBlockBytes / 16;

    const PingpongBarriers<kCfg>& barriers;
    int warpgroup;
    int rows;
    u32 arrivals;  // at a consumed stage of the n side
    RingPosition<kCfg.m_stages> m;
    RingPosition<kCfg.n_stages> n;

    // kN: columns that are multiplied.
    template <int kN>
    __device__ __forceinline__ void run(float (&acc)[kHalves * kHalf]) {
        const int steps = rows / kTileK;
        const int rest = (rows % kTileK + 15) / 16;
        u32 last_m = 0;
        u32 last_n = 0;
        for (int step = 0; step < steps; ++step) {
            wait_for(barriers.n_loaded(n.slot), n.phase);
            wait_for(barriers.m_loaded(m.slot), m.phase);
            const u64 m_operand = m_descriptor();
            const u64 n_operand = n_descriptor();
            wgmma_fence();
#pragma unroll
            for (int k16 = 0; k16 < kTileK / 16; ++k16) multiply<kN>(acc, m_operand, n_operand, k16);
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) release(last_m, last_n);  // the stage before has been read
            last_m = barriers.m_consumed(m.slot);
            last_n = barriers.n_consumed(n.slot);
            m.advance();
            n.advance();
        }
        if (rest > 0) {
            wait_for(barriers.n_loaded(n.slot), n.phase);
            wait_for(barriers.m_loaded(m.slot), m.phase);
            const u64 m_operand = m_descriptor();
            const u64 n_operand = n_descriptor();
            for (int k16 = 0; k16 < rest; ++k16) {
                wgmma_fence();
                multiply<kN>(acc, m_operand, n_operand, k16);
                wgmma_commit();
            }
        }
        warp_sync();  // all lanes have seen their turn come: the next one may follow, two phases are told apart no more
        if (lane_id() == 0) mbarrier_arrive(barriers.turn(warpgroup ^ 1));
        wgmma_wait<0>();
        if (steps > 0) release(last_m, last_n);
        if (rest > 0) release(barriers.m_consumed(m.slot), barriers.n_consumed(n.slot));
    }

   private:
    __device__ __forceinline__ u64 m_descriptor() const {
        return wgmma_descriptor(shared_address(barriers.storage.m_stage[m.slot]), 0, 8 * kLineBytes);
    }
    __device__ __forceinline__ u64 n_descriptor() const {
        return wgmma_descriptor(shared_address(barriers.storage.n_stage[n.slot]), kBlockBytes, 8 * kLineBytes);
    }
    template <int kN>
    __device__ __forceinline__ static void multiply(float (&acc)[kHalves * kHalf], u64 m_operand, u64 n_operand,
                                                    int k16) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            Wgmma<T, kN, 1, 1>::run(acc + half * kHalf, m_operand + half * kNextHalf + k16 * kStep,
                                    n_operand + k16 * kStep);
        }
    }
    __device__ __forceinline__ void release(u32 m_barrier, u32 n_barrier) const {
        if (lane_id() != 0) return;
        mbarrier_arrive(m_barrier);
        mbarrier_arrive_many(n_barrier, arrivals);
    }
};

}  // namespace cupy_gmm
