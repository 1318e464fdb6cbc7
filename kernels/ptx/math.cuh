// float32 arithmetic with a rounding that the compiler may not fuse, and the two functions silu needs.
#pragma once

#include "types.cuh"

namespace cupy_gmm {

// mul.rn.f32 (PTX ISA: mul): never contracted into an fma.
__device__ __forceinline__ float mul_rn(float a, float b) {
    float out;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    return out;
}

// add.rn.f32 (PTX ISA: add): never contracted into an fma.
__device__ __forceinline__ float add_rn(float a, float b) {
    float out;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
    return out;
}

// rcp.approx.f32 (PTX ISA: rcp): within 1 ulp, subnormals kept, 1/inf = 0.
__device__ __forceinline__ float rcp_approx(float a) {
    float out;
    asm("rcp.approx.f32 %0, %1;" : "=f"(out) : "f"(a));
    return out;
}

// expf, built into the compiler (ex2.approx after an exact range reduction): within 2 ulp, exp(>88.8) = inf.
__device__ __forceinline__ float exp_f32(float a) { return expf(a); }

}  // namespace cupy_gmm
