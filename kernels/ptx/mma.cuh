// Tensor-core products of one warp: 16 x 8 += 16 x 16 * 16 x 8, float32 accumulators (PTX ISA: mma).
// Lane l holds, with r = l / 4 and c = 2 * (l % 4):
//   a[0] (r, c..c+1)   a[1] (r+8, c..)   a[2] (r, c+8..)   a[3] (r+8, c+8..)     rows x k
//   b[0] (c..c+1, r)   b[1] (c+8.., r)                                          k x columns
//   d[0], d[1] (r, c..c+1)   d[2], d[3] (r+8, c..c+1)                           rows x columns
#pragma once

#include "types.cuh"

namespace cupy_gmm {

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
__device__ __forceinline__ void mma_m16n8k16_fp16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <class T>
struct Mma;

template <>
struct Mma<bf16> {
    __device__ __forceinline__ static void run(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        mma_m16n8k16_bf16(d, a, b0, b1);
    }
};

template <>
struct Mma<fp16> {
    __device__ __forceinline__ static void run(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        mma_m16n8k16_fp16(d, a, b0, b1);
    }
};

}  // namespace cupy_gmm
