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

inline void prefetch_tensormap(const TensorMap*) {}

inline void tma_load_2d(u32 shared, const TensorMap* map, u32 barrier, i32 c0, i32 c1) {
    shim::copy_box(shared, map, barrier, 2, {c0, c1, 0, 0});
}
inline void tma_load_3d(u32 shared, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2) {
    shim::copy_box(shared, map, barrier, 3, {c0, c1, c2, 0});
}
inline void tma_load_4d(u32 shared, const TensorMap* map, u32 barrier, i32 c0, i32 c1, i32 c2, i32 c3) {
    shim::copy_box(shared, map, barrier, 4, {c0, c1, c2, c3});
}

}  // namespace cupy_gmm
