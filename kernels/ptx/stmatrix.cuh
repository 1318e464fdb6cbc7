// Four 8x8 matrices of 16-bit elements, fragments -> shared memory (PTX ISA: stmatrix).
#pragma once

#include "types.cuh"

namespace cupy_gmm {

// stmatrix.sync.aligned.m8n8.x4: lane l gives the address where row l % 8 of matrix l / 8 goes, 16 bytes.
__device__ __forceinline__ void stmatrix_x4(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0), "r"(m1),
                 "r"(m2), "r"(m3)
                 : "memory");
}

// stmatrix.sync.aligned.m8n8.x4.trans: lane l gives the address where column l % 8 of matrix l / 8 goes, 16 bytes.
__device__ __forceinline__ void stmatrix_x4_trans(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m0),
                 "r"(m1), "r"(m2), "r"(m3)
                 : "memory");
}

}  // namespace cupy_gmm
