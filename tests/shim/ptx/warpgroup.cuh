// Twin of kernels/ptx/warpgroup.cuh: register budgets mean nothing here, but a whole warp must ask for them.
#pragma once

#include "misc.cuh"

namespace cupy_gmm {

template <int kRegisters>
void setmaxnreg_inc() {
    warp_sync();
}
template <int kRegisters>
void setmaxnreg_dec() {
    warp_sync();
}
inline void named_barrier_sync(int id, int threads) { shim::meet_named(id, threads); }
inline void fence_proxy_async() {}

}  // namespace cupy_gmm
