// HopperConfig: one tuning point of the forward kernel for sm_90a, and every byte of its shared memory.
#pragma once

#include "../config.cuh"
#include "../tiles.cuh"

namespace cupy_gmm {

inline constexpr int kStagedTokens = 64;                  // tokens that leave together
inline constexpr int kStagedBytes = kStagedTokens * 128;  // of 64 columns of 16 bits
inline constexpr int kTileSlots = 2;                      // tiles announced ahead
inline constexpr int kProducerRegisters = 40;             // 40 + 2 * 232 <= 65536 / 128 - 8
inline constexpr int kConsumerRegisters = 232;

struct HopperConfig {
    int columns;     // weight columns of a CTA's tile: 64 for each consumer warpgroup
    int max_tokens;  // most rows of a row block
    int stages;      // slots of the load ring

    constexpr int consumers() const { return columns / 64; }
    constexpr int threads() const { return 128 * (1 + consumers()); }
    constexpr int w_bytes() const { return columns * kTileK * kElementBytes; }
    constexpr int x_bytes() const { return max_tokens * kTileK * kElementBytes; }
    constexpr int stage_bytes() const { return w_bytes() + x_bytes(); }

    // Ring, staging, barriers and announced tiles, rounded up; HopperStorage must fit.
    constexpr int shared_bytes() const {
        const int barriers = (2 * stages + 2 * kTileSlots + 1) * 8 + kTileSlots * static_cast<int>(sizeof(RowTile));
        return (stages * stage_bytes() + consumers() * 2 * kStagedBytes + barriers + 1023) / 1024 * 1024;
    }

    constexpr bool legal() const {
        return columns == 128 && max_tokens % 64 == 0 && max_tokens <= 256 && stages >= 2 && stages <= 8;
    }
};

template <HopperConfig kCfg>
struct HopperStorage {
    alignas(1024) char stage[kCfg.stages][kCfg.stage_bytes()];  // w tile, then x tile
    alignas(1024) char staged[kCfg.consumers()][2][kStagedBytes];
    u64 loaded[kCfg.stages];
    u64 consumed[kCfg.stages];
    u64 announced[kTileSlots];
    u64 forgotten[kTileSlots];
    u64 claim;
    RowTile tile[kTileSlots];
};

}  // namespace cupy_gmm
