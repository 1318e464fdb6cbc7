// Twin of kernels/ptx/mbarrier.cuh.
#pragma once

#include "../machine.h"
#include "types.cuh"

namespace cupy_gmm {

inline void mbarrier_init(u32 barrier, u32 arrivals) { shim::barrier_init(barrier, arrivals); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(u32 barrier) { shim::barrier_arrive(barrier, 1, 0); }
inline void mbarrier_arrive_many(u32 barrier, u32 arrivals) { shim::barrier_arrive(barrier, arrivals, 0); }
inline void mbarrier_arrive_expect(u32 barrier, u32 bytes) { shim::barrier_arrive(barrier, 1, bytes); }
inline bool mbarrier_try_wait(u32 barrier, u32 parity) { return shim::barrier_try_wait(barrier, parity); }

}  // namespace cupy_gmm
