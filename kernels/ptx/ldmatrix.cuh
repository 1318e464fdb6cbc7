// Four 8x8 matrices of 16-bit elements, shared memory -> fragments (PTX ISA: ldmatrix).
// Lane l gives the address of row l % 8 of matrix l / 8; register i holds matrix i.
#pragma once

#include "types.cuh"

namespace cupy_gmm {

// ldmatrix.sync.aligned.m8n8.x4: a lane gets row lane / 4, columns 2 * (lane % 4) and + 1.
__device__ __forceinline__ void ldmatrix_x4(u32 (&out)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

// ldmatrix.sync.aligned.m8n8.x4.trans: a lane gets column lane / 4, rows 2 * (lane % 4) and + 1.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&out)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

}  // namespace cupy_gmm
