// Twin of kernels/ptx/tma.cuh.
#pragma once

#include "../machine.h"
#include "types.cuh"

namespace cupy_gmm {

// Holds a shim::FakeMap.
struct alignas(64) TensorMap {
    u64 words[16];
};
static_assert(sizeof(TensorMap) == 128, "CUtensorMap");

inline void tma_load_2d(u32 shared, const TensorMap* map, u32 barrier, i32 c0, i32 c1) {
    shim::copy_box(shared, map, barrier, 2, {c0, c1});
}
inline void tma_load_3d(u32 shared, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2) {
    shim::copy_box(shared, map, barrier, 3, {c0, c1, c2});
}
inline void tma_load_4d(u32 shared, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2, i32 c3) {
    shim::copy_box(shared, map, barrier, 4, {c0, c1, c2, c3});
}

inline void tma_load_5d(u32 shared, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
    shim::copy_box(shared, map, barrier, 5, {c0, c1, c2, c3, c4});
}
inline void tma_store_4d(const TensorMap* map, u32 shared, i32 c0, i32 c1, i32 c2, i32 c3) {
    shim::store_box(shared, map, 4, {c0, c1, c2, c3});
}
inline void tma_store_5d(const TensorMap* map, u32 shared, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
    shim::store_box(shared, map, 5, {c0, c1, c2, c3, c4});
}
inline void tma_store_commit() { shim::store_commit(); }
template <int kPending>
void tma_store_wait_read() {
    shim::store_wait(kPending);
}
template <int kPending>
void tma_store_wait() {
    shim::store_wait(kPending);
}

}  // namespace cupy_gmm
