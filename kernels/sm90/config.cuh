// HopperRowsConfig, PingpongConfig: a tuning point of the kernels for sm_90a, and every byte of their shared memory.
#pragma once

#include "../config.cuh"
#include "../ptx/types.cuh"

namespace cupy_gmm {

inline constexpr int kUnitBytes = 16 * 128;   // 16 lines of a staged operand: what the load ring is made of
inline constexpr int kBlockBytes = 64 * 128;  // 64 lines: what a warpgroup multiplies at a time on wgmma's 64-row side
inline constexpr int kStageSlots = 8;         // most stages in flight
inline constexpr int kTileSlots = 2;          // tiles announced ahead
inline constexpr int kTileBytes = 32;         // most bytes of a tile's description
inline constexpr int kStagedLines = 64;       // 128-byte lines of one staging buffer of a warpgroup
inline constexpr int kStagedBytes = kStagedLines * 128;
inline constexpr int kScratchBytes = 1024;  // for the warp that hands out tiles

// Ring, a staging buffer of each consumer, barriers, ring positions, announced tiles, scratch, rounded up;
// HopperStorage must fit.
constexpr int hopper_shared_bytes(int units, int consumers) {
    const int barriers = (2 * kStageSlots + 2 * kTileSlots + 1) * 8;
    const int small = barriers + 2 * (kStageSlots + 1) * 4 + kTileSlots * kTileBytes + kScratchBytes;
    return (units * kUnitBytes + consumers * kStagedBytes + small + 1023) / 1024 * 1024;
}

// Ragged tensor maps (cupy_gmm/_tensormap.py has the arithmetic): coordinates {column, kRagged - (end - row), end,
// kRagged} name `row` of a matrix that ends at row `end`; past it the copy engine reads zeros and writes nothing.
inline constexpr i32 kRagged = 1 << 30;

// Forward and input gradient. A wide tile gives each consumer warpgroup twice 64 columns, which use the tokens in
// shared memory twice as often; its accumulators allow fewer of them.
struct HopperRowsConfig {
    int columns;      // of a wide tile; a narrow one has half of them
    int wide_tokens;  // most tokens of a wide tile
    int tokens;       // most tokens of a narrow one
    int ring;         // units of the load ring of a kernel with one staging buffer a warpgroup

    // Of a thread, once its role is known: 24 + 2 * 240 <= 168 * 3.
    static constexpr int producer_registers() { return 24; }
    static constexpr int consumer_registers() { return 240; }
    constexpr int consumers() const { return columns / 128; }
    constexpr int threads() const { return 128 * (1 + consumers()); }
    constexpr int narrow_columns() const { return columns / 2; }
    constexpr int accumulators() const { return wide_tokens > tokens / 2 ? wide_tokens : tokens / 2; }
    constexpr int shared_bytes() const { return hopper_shared_bytes(ring, consumers()); }
    // Further staging buffers take the end of the ring.
    constexpr int ring_units(int staging) const {
        return ring - (staging - 1) * consumers() * (kStagedBytes / kUnitBytes);
    }

    constexpr bool legal() const {
        return columns == 256 && wide_tokens % 16 == 0 && wide_tokens <= 208 && tokens % 16 == 0 && tokens <= 256 &&
               ring >= 64 && shared_bytes() <= 232448;
    }
};

// What a loading thread knows; kept in shared memory, since it has few registers.
struct LoadState {
    u32 tiles;                // before this one
    u32 starts[kStageSlots];  // where stages begin, by slot; see LoadRing
};

// Tile: what the ticket warp announces, a struct of 32-bit words with `bool ended() const`.
template <HopperRowsConfig kCfg, class Tile>
struct HopperStorage {
    static_assert(sizeof(Tile) <= kTileBytes && sizeof(Tile) % 4 == 0, "see kTileBytes");

    // The load ring, then the staging buffers of each warpgroup.
    alignas(1024) char units[kCfg.ring + kCfg.consumers() * (kStagedBytes / kUnitBytes)][kUnitBytes];
    u64 loaded[kStageSlots];
    u64 consumed[kStageSlots];
    u64 announced[kTileSlots];
    u64 forgotten[kTileSlots];
    u64 claim;
    LoadState loading[2];
    Tile tile[kTileSlots];
    alignas(16) char scratch[kScratchBytes];
};

inline constexpr int kPingpongSlots = 8;   // tiles announced ahead, every second one for each warpgroup
inline constexpr int kPingpongBytes = 64;  // most bytes of a tile's description
inline constexpr int kNarrow = 128;        // columns of a narrow tile
inline constexpr int kPingpongScratchBytes = 1280;

// Two consumer warpgroups take tiles in turn: one multiplies while the other stores. Neighbouring tiles with the same n
// side form a bundle; where the ring of that side holds all rows of a group, they are loaded once a bundle.
struct PingpongConfig {
    int m;         // extent of a tile on wgmma's 64-row side
    int n;         // extent on its other side
    int m_stages;  // slots of the m side's load ring
    int n_stages;  // slots of the n side's
    int bundle;    // most tiles of a bundle
    int front;     // percent of the CTAs that begin with the longest groups; the others begin with the shortest

    // Of a thread, once its role is known: 40 + 2 * 232 <= 168 * 3.
    static constexpr int producer_registers() { return 40; }
    static constexpr int consumer_registers() { return 232; }
    constexpr int consumers() const { return 2; }
    constexpr int threads() const { return 128 * (1 + consumers()); }
    constexpr int m_bytes() const { return m * kTileK * kElementBytes; }
    constexpr int n_bytes() const { return n * kTileK * kElementBytes; }

    constexpr int staged_bytes() const { return 2 * 32 * n * kElementBytes; }  // of a warpgroup: two boxes

    // Rings, staging, barriers, announced tiles, scratch, rounded up; PingpongStorage must fit.
    constexpr int shared_bytes() const {
        const int small = (2 * m_stages + 2 * n_stages + 2 * kPingpongSlots + 1 + 2 + 1) * 8 +
                          kPingpongSlots * kPingpongBytes + kPingpongScratchBytes;
        return (m_stages * m_bytes() + n_stages * n_bytes() + consumers() * staged_bytes() + small + 1023) / 1024 *
               1024;
    }

    constexpr bool legal() const {
        return m == 128 && (n == 128 || n == 192) && m_stages >= 2 && n_stages >= 2 && bundle >= 1 && bundle <= 16 &&
               front >= 1 && front <= 100 && shared_bytes() <= 232448;
    }
};

template <PingpongConfig kCfg, class Tile>
struct PingpongStorage {
    static_assert(sizeof(Tile) <= kPingpongBytes && sizeof(Tile) % 4 == 0, "see kPingpongBytes");

    alignas(1024) char m_stage[kCfg.m_stages][kCfg.m_bytes()];
    alignas(1024) char n_stage[kCfg.n_stages][kCfg.n_bytes()];
    alignas(1024) char staged[2][kCfg.staged_bytes()];
    u64 m_loaded[kCfg.m_stages];
    u64 m_consumed[kCfg.m_stages];
    u64 n_loaded[kCfg.n_stages];
    u64 n_consumed[kCfg.n_stages];
    u64 announced[kPingpongSlots];
    u64 forgotten[kPingpongSlots];
    u64 claim;
    u64 turn[2];
    i32 arrived[2];  // of the pieces of a split group's tile, before that of the warpgroup
    Tile tile[kPingpongSlots];
    alignas(16) char scratch[kPingpongScratchBytes];
};

}  // namespace cupy_gmm
