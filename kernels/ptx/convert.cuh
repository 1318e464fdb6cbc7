// float <-> bf16 / fp16, round to nearest even, subnormals, infinities and NaN kept.
// PTX ISA: cvt. No .ftz anywhere.
#pragma once

#include "types.cuh"

namespace cupy_gmm {

// cvt.rn.bf16x2.f32: `low` lands in the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

// cvt.rn.f16x2.f32: `low` lands in the low half; overflow gives infinity.
__device__ __forceinline__ u32 pack_fp16(float low, float high) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

// cvt.f32.f16
__device__ __forceinline__ float unpack_fp16(u16 bits) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
    return out;
}

// mov.b32: a bf16 is the upper half of a float.
__device__ __forceinline__ float unpack_bf16(u16 bits) {
    float out;
    asm("mov.b32 %0, %1;" : "=f"(out) : "r"(static_cast<u32>(bits) << 16));
    return out;
}

template <class T>
struct Convert;

template <>
struct Convert<bf16> {
    __device__ static float load(bf16 value) { return unpack_bf16(value.bits); }
    __device__ static u32 pack(float low, float high) { return pack_bf16(low, high); }
    __device__ static bf16 store(float value) { return bf16{static_cast<u16>(pack_bf16(value, 0.0f))}; }
};

template <>
struct Convert<fp16> {
    __device__ static float load(fp16 value) { return unpack_fp16(value.bits); }
    __device__ static u32 pack(float low, float high) { return pack_fp16(low, high); }
    __device__ static fp16 store(float value) { return fp16{static_cast<u16>(pack_fp16(value, 0.0f))}; }
};

}  // namespace cupy_gmm
