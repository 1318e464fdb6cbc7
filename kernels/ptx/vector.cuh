// 16 bytes of global memory in one access. A struct copy would do, but the compiler cuts it into words when they are
// used one by one.
#pragma once

#include "types.cuh"

namespace cupy_gmm {

// ld.global.nc.v4.u32 (PTX ISA: ld.global.nc): memory that no thread of the launch writes; address a multiple of 16.
__device__ __forceinline__ Vec16 load_16_bytes(const void* address) {
    Vec16 out;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(out.word[0]), "=r"(out.word[1]), "=r"(out.word[2]), "=r"(out.word[3])
        : "l"(address));
    return out;
}

// mov.b32 (PTX ISA: mov): the bits of a float and back.
__device__ __forceinline__ float float_of_bits(u32 bits) {
    float out;
    asm("mov.b32 %0, %1;" : "=f"(out) : "r"(bits));
    return out;
}
__device__ __forceinline__ u32 bits_of_float(float value) {
    u32 out;
    asm("mov.b32 %0, %1;" : "=r"(out) : "f"(value));
    return out;
}

}  // namespace cupy_gmm
