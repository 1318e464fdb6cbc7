// Global loads and stores of 16 bytes that bypass the first-level cache: for values that other CTAs write during the
// same launch.
#pragma once

#include "types.cuh"

namespace cupy_gmm {

struct alignas(8) Float2 {
    float at[2];
};
struct alignas(16) Float4 {
    float at[4];
};

// ld.global.cg.v4.f32 (PTX ISA: ld, cache operators)
__device__ __forceinline__ Float4 load_through(const float* address) {
    Float4 out;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(out.at[0]), "=f"(out.at[1]), "=f"(out.at[2]), "=f"(out.at[3])
                 : "l"(address)
                 : "memory");
    return out;
}

// st.global.cg.v4.f32 (PTX ISA: st, cache operators)
__device__ __forceinline__ void store_through(float* address, const Float4& value) {
    asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(value.at[0]), "f"(value.at[1]),
                 "f"(value.at[2]), "f"(value.at[3])
                 : "memory");
}

}  // namespace cupy_gmm
