// Twin of kernels/ptx/ldmatrix.cuh, which Hopper's kernels include and do not call.
#pragma once

#include "../machine.h"
#include "types.cuh"

namespace cupy_gmm {

inline void ldmatrix_x4(u32 (&)[4], u32) { shim::fail("ldmatrix is not emulated"); }
inline void ldmatrix_x4_trans(u32 (&)[4], u32) { shim::fail("ldmatrix is not emulated"); }

}  // namespace cupy_gmm
