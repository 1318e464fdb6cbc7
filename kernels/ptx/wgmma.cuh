// Products of a warpgroup on shared memory: 64 x N += 64 x 16 * 16 x N, float32 accumulators (PTX ISA: wgmma).
//
// Thread t of the warpgroup, warp w = t / 32, lane l: d[4 j + 0, 1] is row 16 w + l / 4, columns 8 j + 2 (l % 4) and +
// 1; d[4 j + 2, 3] is 8 rows further down. Operands are 128-byte-swizzled tiles named by descriptors. Accumulators are
// read and written asynchronously: nothing may touch them between wgmma_fence and the wait.
#pragma once

#include "types.cuh"

namespace cupy_gmm {

// Matrix descriptor of a 128-byte-swizzled tile that begins at a multiple of 1024 bytes (PTX ISA: matrix descriptor).
// `stride` = bytes between groups of eight lines; `leading` = bytes between 64-wide blocks of an MN-major tile.
__device__ __forceinline__ u64 wgmma_descriptor(u32 address, u32 leading, u32 stride) {
    return static_cast<u64>((address & 0x3ffffu) >> 4) | static_cast<u64>(leading >> 4) << 16 |
           static_cast<u64>(stride >> 4) << 32 | 1ull << 62;
}

// wgmma.fence.sync.aligned
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group.sync.aligned
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// wgmma.wait_group.sync.aligned: at most kPending groups stay in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// wgmma.mma_async.sync.aligned.m64nNk16.f32.{bf16,f16}: kTransA, kTransB = 1 for an MN-major operand.
template <class T, int kN, int kTransA, int kTransB>
struct Wgmma;

// clang-format off
#define CUPY_GMM_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CUPY_GMM_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define CUPY_GMM_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define CUPY_GMM_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define CUPY_GMM_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define CUPY_GMM_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define CUPY_GMM_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define CUPY_GMM_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define CUPY_GMM_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define CUPY_GMM_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define CUPY_GMM_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define CUPY_GMM_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define CUPY_GMM_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define CUPY_GMM_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define CUPY_GMM_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define CUPY_GMM_R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define CUPY_GMM_D4(o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3])
#define CUPY_GMM_D8(o) "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]), "+f"(d[o + 5]), "+f"(d[o + 6]), "+f"(d[o + 7])

#define CUPY_GMM_REGISTERS_16 CUPY_GMM_R0
#define CUPY_GMM_OPERANDS_16 CUPY_GMM_D8(0)
#define CUPY_GMM_REGISTERS_32 CUPY_GMM_R0 ", " CUPY_GMM_R1
#define CUPY_GMM_OPERANDS_32 CUPY_GMM_D8(0), CUPY_GMM_D8(8)
#define CUPY_GMM_REGISTERS_48 CUPY_GMM_R0 ", " CUPY_GMM_R1 ", " CUPY_GMM_R2
#define CUPY_GMM_OPERANDS_48 CUPY_GMM_D8(0), CUPY_GMM_D8(8), CUPY_GMM_D8(16)
#define CUPY_GMM_REGISTERS_64 CUPY_GMM_R0 ", " CUPY_GMM_R1 ", " CUPY_GMM_R2 ", " CUPY_GMM_R3
#define CUPY_GMM_OPERANDS_64 CUPY_GMM_D8(0), CUPY_GMM_D8(8), CUPY_GMM_D8(16), CUPY_GMM_D8(24)
#define CUPY_GMM_REGISTERS_80 CUPY_GMM_R0 ", " CUPY_GMM_R1 ", " CUPY_GMM_R2 ", " CUPY_GMM_R3 ", " CUPY_GMM_R4
#define CUPY_GMM_OPERANDS_80 CUPY_GMM_D8(0), CUPY_GMM_D8(8), CUPY_GMM_D8(16), CUPY_GMM_D8(24), CUPY_GMM_D8(32)
#define CUPY_GMM_REGISTERS_96 CUPY_GMM_R0 ", " CUPY_GMM_R1 ", " CUPY_GMM_R2 ", " CUPY_GMM_R3 ", " CUPY_GMM_R4 ", " CUPY_GMM_R5
#define CUPY_GMM_OPERANDS_96 CUPY_GMM_D8(0), CUPY_GMM_D8(8), CUPY_GMM_D8(16), CUPY_GMM_D8(24), CUPY_GMM_D8(32), CUPY_GMM_D8(40)
#define CUPY_GMM_REGISTERS_112 CUPY_GMM_R0 ", " CUPY_GMM_R1 ", " CUPY_GMM_R2 ", " CUPY_GMM_R3 ", " CUPY_GMM_R4 ", " CUPY_GMM_R5 ", " CUPY_GMM_R6
#define CUPY_GMM_OPERANDS_112 CUPY_GMM_D8(0), CUPY_GMM_D8(8), CUPY_GMM_D8(16), CUPY_GMM_D8(24), CUPY_GMM_D8(32), CUPY_GMM_D8(40), CUPY_GMM_D8(48)
#define CUPY_GMM_REGISTERS_128 CUPY_GMM_R0 ", " CUPY_GMM_R1 ", " CUPY_GMM_R2 ", " CUPY_GMM_R3 ", " CUPY_GMM_R4 ", " CUPY_GMM_R5 ", " CUPY_GMM_R6 ", " CUPY_GMM_R7
#define CUPY_GMM_OPERANDS_128 CUPY_GMM_D8(0), CUPY_GMM_D8(8), CUPY_GMM_D8(16), CUPY_GMM_D8(24), CUPY_GMM_D8(32), CUPY_GMM_D8(40), CUPY_GMM_D8(48), CUPY_GMM_D8(56)
#define CUPY_GMM_REGISTERS_144 CUPY_GMM_R0 ", " CUPY_GMM_R1 ", " CUPY_GMM_R2 ", " CUPY_GMM_R3 ", " CUPY_GMM_R4 ", " CUPY_GMM_R5 ", " CUPY_GMM_R6 ", " CUPY_GMM_R7 ", " CUPY_GMM_R8
#define CUPY_GMM_OPERANDS_144 CUPY_GMM_D8(0), CUPY_GMM_D8(8), CUPY_GMM_D8(16), CUPY_GMM_D8(24), CUPY_GMM_D8(32), CUPY_GMM_D8(40), CUPY_GMM_D8(48), CUPY_GMM_D8(56), CUPY_GMM_D8(64)
#define CUPY_GMM_REGISTERS_160 CUPY_GMM_R0 ", " CUPY_GMM_R1 ", " CUPY_GMM_R2 ", " CUPY_GMM_R3 ", " CUPY_GMM_R4 ", " CUPY_GMM_R5 ", " CUPY_GMM_R6 ", " CUPY_GMM_R7 ", " CUPY_GMM_R8 ", " CUPY_GMM_R9
#define CUPY_GMM_OPERANDS_160 CUPY_GMM_D8(0), CUPY_GMM_D8(8), CUPY_GMM_D8(16), CUPY_GMM_D8(24), CUPY_GMM_D8(32), CUPY_GMM_D8(40), CUPY_GMM_D8(48), CUPY_GMM_D8(56), CUPY_GMM_D8(64), CUPY_GMM_D8(72)
#define CUPY_GMM_REGISTERS_176 CUPY_GMM_R0 ", " CUPY_GMM_R1 ", " CUPY_GMM_R2 ", " CUPY_GMM_R3 ", " CUPY_GMM_R4 ", " CUPY_GMM_R5 ", " CUPY_GMM_R6 ", " CUPY_GMM_R7 ", " CUPY_GMM_R8 ", " CUPY_GMM_R9 ", " CUPY_GMM_R10
#define CUPY_GMM_OPERANDS_176 CUPY_GMM_D8(0), CUPY_GMM_D8(8), CUPY_GMM_D8(16), CUPY_GMM_D8(24), CUPY_GMM_D8(32), CUPY_GMM_D8(40), CUPY_GMM_D8(48), CUPY_GMM_D8(56), CUPY_GMM_D8(64), CUPY_GMM_D8(72), CUPY_GMM_D8(80)
#define CUPY_GMM_REGISTERS_192 CUPY_GMM_R0 ", " CUPY_GMM_R1 ", " CUPY_GMM_R2 ", " CUPY_GMM_R3 ", " CUPY_GMM_R4 ", " CUPY_GMM_R5 ", " CUPY_GMM_R6 ", " CUPY_GMM_R7 ", " CUPY_GMM_R8 ", " CUPY_GMM_R9 ", " CUPY_GMM_R10 ", " CUPY_GMM_R11
#define CUPY_GMM_OPERANDS_192 CUPY_GMM_D8(0), CUPY_GMM_D8(8), CUPY_GMM_D8(16), CUPY_GMM_D8(24), CUPY_GMM_D8(32), CUPY_GMM_D8(40), CUPY_GMM_D8(48), CUPY_GMM_D8(56), CUPY_GMM_D8(64), CUPY_GMM_D8(72), CUPY_GMM_D8(80), CUPY_GMM_D8(88)
#define CUPY_GMM_REGISTERS_208 CUPY_GMM_R0 ", " CUPY_GMM_R1 ", " CUPY_GMM_R2 ", " CUPY_GMM_R3 ", " CUPY_GMM_R4 ", " CUPY_GMM_R5 ", " CUPY_GMM_R6 ", " CUPY_GMM_R7 ", " CUPY_GMM_R8 ", " CUPY_GMM_R9 ", " CUPY_GMM_R10 ", " CUPY_GMM_R11 ", " CUPY_GMM_R12
#define CUPY_GMM_OPERANDS_208 CUPY_GMM_D8(0), CUPY_GMM_D8(8), CUPY_GMM_D8(16), CUPY_GMM_D8(24), CUPY_GMM_D8(32), CUPY_GMM_D8(40), CUPY_GMM_D8(48), CUPY_GMM_D8(56), CUPY_GMM_D8(64), CUPY_GMM_D8(72), CUPY_GMM_D8(80), CUPY_GMM_D8(88), CUPY_GMM_D8(96)
#define CUPY_GMM_REGISTERS_224 CUPY_GMM_R0 ", " CUPY_GMM_R1 ", " CUPY_GMM_R2 ", " CUPY_GMM_R3 ", " CUPY_GMM_R4 ", " CUPY_GMM_R5 ", " CUPY_GMM_R6 ", " CUPY_GMM_R7 ", " CUPY_GMM_R8 ", " CUPY_GMM_R9 ", " CUPY_GMM_R10 ", " CUPY_GMM_R11 ", " CUPY_GMM_R12 ", " CUPY_GMM_R13
#define CUPY_GMM_OPERANDS_224 CUPY_GMM_D8(0), CUPY_GMM_D8(8), CUPY_GMM_D8(16), CUPY_GMM_D8(24), CUPY_GMM_D8(32), CUPY_GMM_D8(40), CUPY_GMM_D8(48), CUPY_GMM_D8(56), CUPY_GMM_D8(64), CUPY_GMM_D8(72), CUPY_GMM_D8(80), CUPY_GMM_D8(88), CUPY_GMM_D8(96), CUPY_GMM_D8(104)
#define CUPY_GMM_REGISTERS_240 CUPY_GMM_R0 ", " CUPY_GMM_R1 ", " CUPY_GMM_R2 ", " CUPY_GMM_R3 ", " CUPY_GMM_R4 ", " CUPY_GMM_R5 ", " CUPY_GMM_R6 ", " CUPY_GMM_R7 ", " CUPY_GMM_R8 ", " CUPY_GMM_R9 ", " CUPY_GMM_R10 ", " CUPY_GMM_R11 ", " CUPY_GMM_R12 ", " CUPY_GMM_R13 ", " CUPY_GMM_R14
#define CUPY_GMM_OPERANDS_240 CUPY_GMM_D8(0), CUPY_GMM_D8(8), CUPY_GMM_D8(16), CUPY_GMM_D8(24), CUPY_GMM_D8(32), CUPY_GMM_D8(40), CUPY_GMM_D8(48), CUPY_GMM_D8(56), CUPY_GMM_D8(64), CUPY_GMM_D8(72), CUPY_GMM_D8(80), CUPY_GMM_D8(88), CUPY_GMM_D8(96), CUPY_GMM_D8(104), CUPY_GMM_D8(112)
#define CUPY_GMM_REGISTERS_256 CUPY_GMM_R0 ", " CUPY_GMM_R1 ", " CUPY_GMM_R2 ", " CUPY_GMM_R3 ", " CUPY_GMM_R4 ", " CUPY_GMM_R5 ", " CUPY_GMM_R6 ", " CUPY_GMM_R7 ", " CUPY_GMM_R8 ", " CUPY_GMM_R9 ", " CUPY_GMM_R10 ", " CUPY_GMM_R11 ", " CUPY_GMM_R12 ", " CUPY_GMM_R13 ", " CUPY_GMM_R14 ", " CUPY_GMM_R15
#define CUPY_GMM_OPERANDS_256 CUPY_GMM_D8(0), CUPY_GMM_D8(8), CUPY_GMM_D8(16), CUPY_GMM_D8(24), CUPY_GMM_D8(32), CUPY_GMM_D8(40), CUPY_GMM_D8(48), CUPY_GMM_D8(56), CUPY_GMM_D8(64), CUPY_GMM_D8(72), CUPY_GMM_D8(80), CUPY_GMM_D8(88), CUPY_GMM_D8(96), CUPY_GMM_D8(104), CUPY_GMM_D8(112), CUPY_GMM_D8(120)

// Odd multiples of 8: the extents that a tile of many tokens may have.
#define CUPY_GMM_REGISTERS_104 CUPY_GMM_REGISTERS_96 ", %48, %49, %50, %51"
#define CUPY_GMM_OPERANDS_104 CUPY_GMM_OPERANDS_96, CUPY_GMM_D4(48)
#define CUPY_GMM_REGISTERS_120 CUPY_GMM_REGISTERS_112 ", %56, %57, %58, %59"
#define CUPY_GMM_OPERANDS_120 CUPY_GMM_OPERANDS_112, CUPY_GMM_D4(56)
#define CUPY_GMM_REGISTERS_136 CUPY_GMM_REGISTERS_128 ", %64, %65, %66, %67"
#define CUPY_GMM_OPERANDS_136 CUPY_GMM_OPERANDS_128, CUPY_GMM_D4(64)
#define CUPY_GMM_REGISTERS_152 CUPY_GMM_REGISTERS_144 ", %72, %73, %74, %75"
#define CUPY_GMM_OPERANDS_152 CUPY_GMM_OPERANDS_144, CUPY_GMM_D4(72)
#define CUPY_GMM_REGISTERS_168 CUPY_GMM_REGISTERS_160 ", %80, %81, %82, %83"
#define CUPY_GMM_OPERANDS_168 CUPY_GMM_OPERANDS_160, CUPY_GMM_D4(80)
#define CUPY_GMM_REGISTERS_184 CUPY_GMM_REGISTERS_176 ", %88, %89, %90, %91"
#define CUPY_GMM_OPERANDS_184 CUPY_GMM_OPERANDS_176, CUPY_GMM_D4(88)
#define CUPY_GMM_REGISTERS_200 CUPY_GMM_REGISTERS_192 ", %96, %97, %98, %99"
#define CUPY_GMM_OPERANDS_200 CUPY_GMM_OPERANDS_192, CUPY_GMM_D4(96)

// a, b, and the transpose bits follow the N / 2 accumulators.
#define CUPY_GMM_WGMMA(type, name, n, a_at, b_at, ta_at, tb_at)                                                    \
    template <int kTransA, int kTransB>                                                                            \
    struct Wgmma<type, n, kTransA, kTransB> {                                                                      \
        __device__ __forceinline__ static void run(float* d, u64 a, u64 b) {                                       \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." name "." name " {"                      \
                         CUPY_GMM_REGISTERS_##n "}, %" #a_at ", %" #b_at ", 1, 1, 1, %" #ta_at ", %" #tb_at ";"    \
                         : CUPY_GMM_OPERANDS_##n : "l"(a), "l"(b), "n"(kTransA), "n"(kTransB));                    \
        }                                                                                                          \
    };
#define CUPY_GMM_WGMMA_BOTH(n, a_at, b_at, ta_at, tb_at)        \
    CUPY_GMM_WGMMA(bf16, "bf16", n, a_at, b_at, ta_at, tb_at)   \
    CUPY_GMM_WGMMA(fp16, "f16", n, a_at, b_at, ta_at, tb_at)

CUPY_GMM_WGMMA_BOTH(16, 8, 9, 10, 11)
CUPY_GMM_WGMMA_BOTH(32, 16, 17, 18, 19)
CUPY_GMM_WGMMA_BOTH(48, 24, 25, 26, 27)
CUPY_GMM_WGMMA_BOTH(64, 32, 33, 34, 35)
CUPY_GMM_WGMMA_BOTH(80, 40, 41, 42, 43)
CUPY_GMM_WGMMA_BOTH(96, 48, 49, 50, 51)
CUPY_GMM_WGMMA_BOTH(104, 52, 53, 54, 55)
CUPY_GMM_WGMMA_BOTH(112, 56, 57, 58, 59)
CUPY_GMM_WGMMA_BOTH(120, 60, 61, 62, 63)
CUPY_GMM_WGMMA_BOTH(128, 64, 65, 66, 67)
CUPY_GMM_WGMMA_BOTH(136, 68, 69, 70, 71)
CUPY_GMM_WGMMA_BOTH(144, 72, 73, 74, 75)
CUPY_GMM_WGMMA_BOTH(152, 76, 77, 78, 79)
CUPY_GMM_WGMMA_BOTH(160, 80, 81, 82, 83)
CUPY_GMM_WGMMA_BOTH(168, 84, 85, 86, 87)
CUPY_GMM_WGMMA_BOTH(176, 88, 89, 90, 91)
CUPY_GMM_WGMMA_BOTH(184, 92, 93, 94, 95)
CUPY_GMM_WGMMA_BOTH(192, 96, 97, 98, 99)
CUPY_GMM_WGMMA_BOTH(200, 100, 101, 102, 103)
CUPY_GMM_WGMMA_BOTH(208, 104, 105, 106, 107)
CUPY_GMM_WGMMA_BOTH(224, 112, 113, 114, 115)
CUPY_GMM_WGMMA_BOTH(240, 120, 121, 122, 123)
CUPY_GMM_WGMMA_BOTH(256, 128, 129, 130, 131)

#undef CUPY_GMM_R0
#undef CUPY_GMM_REGISTERS_16
#undef CUPY_GMM_OPERANDS_16
#undef CUPY_GMM_R1
#undef CUPY_GMM_REGISTERS_32
#undef CUPY_GMM_OPERANDS_32
#undef CUPY_GMM_R2
#undef CUPY_GMM_REGISTERS_48
#undef CUPY_GMM_OPERANDS_48
#undef CUPY_GMM_R3
#undef CUPY_GMM_REGISTERS_64
#undef CUPY_GMM_OPERANDS_64
#undef CUPY_GMM_R4
#undef CUPY_GMM_REGISTERS_80
#undef CUPY_GMM_OPERANDS_80
#undef CUPY_GMM_R5
#undef CUPY_GMM_REGISTERS_96
#undef CUPY_GMM_OPERANDS_96
#undef CUPY_GMM_R6
#undef CUPY_GMM_REGISTERS_104
#undef CUPY_GMM_OPERANDS_104
#undef CUPY_GMM_REGISTERS_112
#undef CUPY_GMM_OPERANDS_112
#undef CUPY_GMM_R7
#undef CUPY_GMM_REGISTERS_120
#undef CUPY_GMM_OPERANDS_120
#undef CUPY_GMM_REGISTERS_128
#undef CUPY_GMM_OPERANDS_128
#undef CUPY_GMM_R8
#undef CUPY_GMM_REGISTERS_136
#undef CUPY_GMM_OPERANDS_136
#undef CUPY_GMM_REGISTERS_144
#undef CUPY_GMM_OPERANDS_144
#undef CUPY_GMM_R9
#undef CUPY_GMM_REGISTERS_152
#undef CUPY_GMM_OPERANDS_152
#undef CUPY_GMM_REGISTERS_160
#undef CUPY_GMM_OPERANDS_160
#undef CUPY_GMM_R10
#undef CUPY_GMM_REGISTERS_168
#undef CUPY_GMM_OPERANDS_168
#undef CUPY_GMM_REGISTERS_176
#undef CUPY_GMM_OPERANDS_176
#undef CUPY_GMM_R11
#undef CUPY_GMM_REGISTERS_184
#undef CUPY_GMM_OPERANDS_184
#undef CUPY_GMM_REGISTERS_192
#undef CUPY_GMM_OPERANDS_192
#undef CUPY_GMM_R12
#undef CUPY_GMM_REGISTERS_200
#undef CUPY_GMM_OPERANDS_200
#undef CUPY_GMM_REGISTERS_208
#undef CUPY_GMM_OPERANDS_208
#undef CUPY_GMM_R13
#undef CUPY_GMM_REGISTERS_224
#undef CUPY_GMM_OPERANDS_224
#undef CUPY_GMM_R14
#undef CUPY_GMM_REGISTERS_240
#undef CUPY_GMM_OPERANDS_240
#undef CUPY_GMM_R15
#undef CUPY_GMM_REGISTERS_256
#undef CUPY_GMM_OPERANDS_256
#undef CUPY_GMM_D4
#undef CUPY_GMM_D8
#undef CUPY_GMM_WGMMA
#undef CUPY_GMM_WGMMA_BOTH
// clang-format on

}  // namespace cupy_gmm
