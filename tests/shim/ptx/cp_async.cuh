// Twin of kernels/ptx/cp_async.cuh: Hopper's kernels take addresses from it and copy otherwise.
#pragma once

#include "../machine.h"
#include "types.cuh"

namespace cupy_gmm {

inline u32 shared_address(const void* address) { return shim::handle_of(address); }
inline void cp_async_16(u32, const void*, u32) { shim::fail("cp.async is not emulated"); }

}  // namespace cupy_gmm
