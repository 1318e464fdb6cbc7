// Barriers, votes, shuffles, integer atomics and thread coordinates: one intrinsic a function.
#pragma once

#include "types.cuh"

namespace cupy_gmm {

inline constexpr u32 kFullWarp = 0xffffffffu;

// bar.sync 0 (PTX ISA: barrier)
__device__ __forceinline__ void block_sync() { __syncthreads(); }
// bar.warp.sync (PTX ISA: bar.warp.sync)
__device__ __forceinline__ void warp_sync() { __syncwarp(kFullWarp); }
// membar.gl (PTX ISA: membar)
__device__ __forceinline__ void fence_device() { __threadfence(); }

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x & 31u); }

// mov.b32: the same value, of which the compiler no longer knows where it is from: what follows from it is computed
// where it stands instead of being kept in registers from before a loop.
__device__ __forceinline__ u32 forgotten(u32 value) {
    asm volatile("mov.b32 %0, %0;" : "+r"(value));
    return value;
}

// mov.f32: a zero of which the compiler does not know that it is one. It would else clear each accumulator again
// wherever paths meet that leave it untouched.
__device__ __forceinline__ float plain_zero() {
    float value;
    asm volatile("mov.f32 %0, 0f00000000;" : "=f"(value));
    return value;
}

// vote.sync.ballot (PTX ISA: vote.sync)
__device__ __forceinline__ u32 warp_ballot(bool predicate) { return __ballot_sync(kFullWarp, predicate); }
// match.sync.any (PTX ISA: match.sync)
__device__ __forceinline__ u32 warp_match_any(i32 value) { return __match_any_sync(kFullWarp, value); }

// shfl.sync.idx / up / bfly (PTX ISA: shfl.sync)
template <class T>
__device__ __forceinline__ T warp_shfl(T value, int source_lane) {
    return __shfl_sync(kFullWarp, value, source_lane);
}
template <class T>
__device__ __forceinline__ T warp_shfl_up(T value, int distance) {
    return __shfl_up_sync(kFullWarp, value, distance);
}
template <class T>
__device__ __forceinline__ T warp_shfl_xor(T value, int mask) {
    return __shfl_xor_sync(kFullWarp, value, mask);
}

// popc, fns-free bit helpers (PTX ISA: popc)
__device__ __forceinline__ int popcount(u32 value) { return __popc(value); }
// bfind-style count of trailing zeros (PTX ISA: brev + clz)
__device__ __forceinline__ int first_set_bit(u32 value) { return __ffs(static_cast<int>(value)) - 1; }

// atom.add / red.or (PTX ISA: atom)
__device__ __forceinline__ i32 atomic_add(i32* address, i32 value) { return atomicAdd(address, value); }
__device__ __forceinline__ u64 atomic_add(u64* address, u64 value) { return atomicAdd(address, value); }
__device__ __forceinline__ void atomic_or(i32* address, i32 value) { atomicOr(address, value); }

}  // namespace cupy_gmm
