// Boxes of a tensor between global and shared memory by the copy engine (PTX ISA: cp.async.bulk.tensor). Coordinates
// count elements, innermost first. Loads: what lies outside the tensor becomes zero; the barrier is told the bytes of
// the whole box. Stores: what lies outside is not written.
#pragma once

#include "types.cuh"

namespace cupy_gmm {

// What cuTensorMapEncodeTiled writes; opaque.
struct alignas(64) TensorMap {
    u64 words[16];
};
static_assert(sizeof(TensorMap) == 128, "CUtensorMap");

// cp.async.bulk.tensor.2d
__device__ __forceinline__ void tma_load_2d(u32 shared, const TensorMap* map, u32 barrier, i32 c0, i32 c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1)
        : "memory");
}

// cp.async.bulk.tensor.3d
__device__ __forceinline__ void tma_load_3d(u32 shared, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(shared),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

// cp.async.bulk.tensor.4d
__device__ __forceinline__ void tma_load_4d(u32 shared, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2,
                                            i32 c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(shared),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// cp.async.bulk.tensor.5d
__device__ __forceinline__ void tma_load_5d(u32 shared, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2,
                                            i32 c3, i32 c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2];" ::"r"(shared),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// cp.async.bulk.tensor.4d, shared -> global
__device__ __forceinline__ void tma_store_4d(const TensorMap* map, u32 shared, i32 c0, i32 c1, i32 c2, i32 c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

// cp.async.bulk.tensor.5d, shared -> global
__device__ __forceinline__ void tma_store_5d(const TensorMap* map, u32 shared, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
                 "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}

// cp.async.bulk.commit_group: the stores of this thread so far are a group.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// cp.async.bulk.wait_group.read: at most kPending groups of this thread have not read shared memory yet.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// cp.async.bulk.wait_group: at most kPending groups of this thread are not complete.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cupy_gmm
