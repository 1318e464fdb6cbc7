// Asynchronous copies global -> shared of 16 bytes a thread (PTX ISA: cp.async).
#pragma once

#include "types.cuh"

namespace cupy_gmm {

// cvta.to.shared: the 32-bit address that ldmatrix and cp.async take.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// cp.async.cg: copies `bytes` (0..16) and fills the rest of the 16 bytes with zeros; 0 reads nothing.
__device__ __forceinline__ void cp_async_16(u32 shared, const void* global, u32 bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
                 : "memory");
}

// cp.async.commit_group
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// cp.async.wait_group: returns when at most kPending of this thread's groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cupy_gmm
