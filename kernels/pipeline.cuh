// A ring of slots between threads that fill and threads that empty: position and phase of one side.
#pragma once

#include "ptx/mbarrier.cuh"

namespace cupy_gmm {

__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

template <int kSlots>
struct RingPosition {
    int slot = 0;
    u32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == kSlots) {
            slot = 0;
            phase ^= 1;
        }
    }
    __device__ __forceinline__ void advance_by(int steps) {
        const int ahead = slot + steps;
        slot = ahead % kSlots;
        phase ^= ahead / kSlots & 1;
    }
};

}  // namespace cupy_gmm
