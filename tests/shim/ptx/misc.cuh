// Twin of kernels/ptx/misc.cuh.
#pragma once

#include <cstring>

#include "../machine.h"
#include "types.cuh"

namespace cupy_gmm {

inline constexpr u32 kFullWarp = 0xffffffffu;

// Collectives by kind: all lanes of a warp must be at the same.
enum Collective : int { kSync, kBallot, kShuffle, kShuffleUp, kShuffleXor, kStore, kStoreTransposed };

template <class T>
void exchange(Collective kind, T value, T (&out)[32]) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    uint64_t raw = 0;
    uint64_t all[32];
    std::memcpy(&raw, &value, sizeof(T));
    shim::exchange_in_warp(kind, raw, all);
    for (int lane = 0; lane < 32; ++lane) std::memcpy(&out[lane], &all[lane], sizeof(T));
}

inline void block_sync() { shim::meet_block(); }
inline void warp_sync() {
    u32 all[32];
    exchange<u32>(kSync, 0, all);
}
inline void fence_device() {}

inline int lane_id() { return static_cast<int>(threadIdx.x & 31u); }

inline u32 forgotten(u32 value) { return value; }
inline float plain_zero() { return 0.0f; }

inline u32 warp_ballot(bool predicate) {
    u32 all[32];
    exchange<u32>(kBallot, predicate, all);
    u32 votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= all[lane] << lane;
    return votes;
}

template <class T>
T warp_shfl(T value, int source_lane) {
    T all[32];
    exchange(kShuffle, value, all);
    return all[source_lane & 31];
}
template <class T>
T warp_shfl_up(T value, int distance) {
    T all[32];
    exchange(kShuffleUp, value, all);
    return lane_id() >= distance ? all[lane_id() - distance] : value;
}
template <class T>
T warp_shfl_xor(T value, int mask) {
    T all[32];
    exchange(kShuffleXor, value, all);
    return all[lane_id() ^ mask];
}

inline int popcount(u32 value) { return __builtin_popcount(value); }
inline int first_set_bit(u32 value) { return __builtin_ffs(static_cast<int>(value)) - 1; }

// Fibers change only where they ask for it, so that plain arithmetic is atomic.
inline i32 atomic_add(i32* address, i32 value) {
    const i32 before = *address;
    *address += value;
    return before;
}
inline u64 atomic_add(u64* address, u64 value) {
    if (reinterpret_cast<uintptr_t>(address) % 8 != 0) shim::fail("an atomic at an unaligned address");
    const u64 before = *address;
    *address += value;
    return before;
}
inline void atomic_or(i32* address, i32 value) { *address |= value; }

}  // namespace cupy_gmm
