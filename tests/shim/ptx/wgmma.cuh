// Twin of kernels/ptx/wgmma.cuh.
#pragma once

#include <type_traits>

#include "misc.cuh"

namespace cupy_gmm {

inline u64 wgmma_descriptor(u32 address, u32 leading, u32 stride) {
    return static_cast<u64>((address & 0x3ffffu) >> 4) | static_cast<u64>(leading >> 4) << 16 |
           static_cast<u64>(stride >> 4) << 32 | 1ull << 62;
}

inline void wgmma_fence() { warp_sync(); }
inline void wgmma_commit() { shim::product_commit(); }

template <int kPending>
void wgmma_wait() {
    shim::product_wait(kPending);
    warp_sync();
}

template <class T, int kN, int kTransA, int kTransB>
struct Wgmma {
    static_assert(kN % 8 == 0 && kN >= 16 && kN <= 256);
    static void run(float* d, u64 a, u64 b) {
        shim::product_issue({std::is_same_v<T, fp16>, kN, kTransA != 0, kTransB != 0}, d, a, b);
    }
};

}  // namespace cupy_gmm
