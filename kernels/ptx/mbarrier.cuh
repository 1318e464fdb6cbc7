// Barriers in shared memory that threads and the copy engine arrive at (PTX ISA: mbarrier).
#pragma once

#include "types.cuh"

namespace cupy_gmm {

// mbarrier.init.shared::cta.b64
__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init.release.cluster: makes the initialisation visible to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive.shared::cta.b64
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.shared::cta.b64 with a count: as many arrivals in one.
__device__ __forceinline__ void mbarrier_arrive_many(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// mbarrier.arrive.expect_tx.shared::cta.b64: arrives, and the phase also waits for `bytes` of copies.
__device__ __forceinline__ void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// mbarrier.try_wait.parity.shared::cta.b64: true when the phase of this parity has completed; may suspend for a while.
__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

}  // namespace cupy_gmm
