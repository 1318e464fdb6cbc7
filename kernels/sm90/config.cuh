// HopperConfig: one tuning point of the kernels for sm_90a, and every byte of their shared memory.
#pragma once

#include "../config.cuh"
#include "../ptx/types.cuh"

namespace cupy_gmm {

inline constexpr int kTileSlots = 2;     // tiles announced ahead
inline constexpr int kTileBytes = 32;    // most bytes of a tile's description
inline constexpr int kStagedLines = 64;  // 128-byte lines of one staging buffer of a warpgroup
inline constexpr int kStagedBytes = kStagedLines * 128;
inline constexpr int kScratchBytes = 1024;     // for the warp that hands out tiles
inline constexpr int kProducerRegisters = 40;  // 40 + 2 * 232 <= 65536 / 128 - 8
inline constexpr int kConsumerRegisters = 232;

struct HopperConfig {
    int m;       // extent of a tile on wgmma's 64-row side: 64 for each consumer warpgroup
    int n;       // extent on its other side
    int stages;  // slots of the load ring

    constexpr int consumers() const { return m / 64; }
    constexpr int threads() const { return 128 * (1 + consumers()); }
    constexpr int m_bytes() const { return m * kTileK * kElementBytes; }
    constexpr int n_bytes() const { return n * kTileK * kElementBytes; }
    constexpr int stage_bytes() const { return m_bytes() + n_bytes(); }

    // Ring, staging, barriers, announced tiles, scratch, rounded up; HopperStorage must fit.
    constexpr int shared_bytes() const {
        const int small = (2 * stages + 2 * kTileSlots + 1) * 8 + kTileSlots * kTileBytes + kScratchBytes;
        return (stages * stage_bytes() + consumers() * 2 * kStagedBytes + small + 1023) / 1024 * 1024;
    }

    constexpr bool legal() const {
        return m == 128 && n % 64 == 0 && n <= 256 && stages >= 2 && stages <= 8 && shared_bytes() <= 232448;
    }
};

// Tile: what the ticket warp announces, a struct of 32-bit words with `bool ended() const`.
template <HopperConfig kCfg, class Tile>
struct HopperStorage {
    static_assert(sizeof(Tile) <= kTileBytes && sizeof(Tile) % 4 == 0, "see kTileBytes");

    alignas(1024) char stage[kCfg.stages][kCfg.stage_bytes()];  // the operand of the 64-row side, then the other
    alignas(1024) char staged[kCfg.consumers()][2][kStagedBytes];
    u64 loaded[kCfg.stages];
    u64 consumed[kCfg.stages];
    u64 announced[kTileSlots];
    u64 forgotten[kTileSlots];
    u64 claim;
    Tile tile[kTileSlots];
    alignas(16) char scratch[kScratchBytes];
};

}  // namespace cupy_gmm
