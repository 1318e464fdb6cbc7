// What a warpgroup needs besides its products: register budget, a barrier of its own, the fence between ordinary shared
// memory accesses and those of the copy engine and tensor cores.
#pragma once

#include "types.cuh"

namespace cupy_gmm {

// setmaxnreg.inc.sync.aligned.u32
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// setmaxnreg.dec.sync.aligned.u32
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// bar.sync: `threads` threads of the block meet at barrier `id` (PTX ISA: barrier).
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// fence.proxy.async.shared::cta (PTX ISA: membar / fence)
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace cupy_gmm
