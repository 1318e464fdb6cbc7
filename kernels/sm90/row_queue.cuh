// Which tile a ticket of the forward kernel stands for.
//
// Row blocks of long groups keep the tensor cores busy, those of short groups, which each need weights of their own,
// the memory: the tickets walk both lists side by side, each from its longest group on. A ticket is a wide tile; where
// the row block is too high for one, and for the last tickets, which end closer together then, it is one of two narrow
// tiles.
#pragma once

#include "../params.cuh"
#include "../ptx/misc.cuh"
#include "../tiles.cuh"
#include "config.cuh"

namespace cupy_gmm {

inline constexpr i32 kSplitPerCta = 1;  // so many wide tiles a CTA are handed out in halves

// What the walking thread knows; kept in shared memory, since it has few registers.
struct RowTicket {
    i32 ticket;
    i32 second;     // 1: of two narrow tiles of this ticket, the first is announced
    u32 announced;  // tiles so far
};

template <HopperRowsConfig kCfg>
struct RowQueue {
    const Params& p;
    RowTicket& mine;

    __device__ RowQueue(const Params& p_, RowTicket& mine_) : p(p_), mine(mine_) {
        mine.ticket = static_cast<i32>(blockIdx.x);
        mine.second = 0;
    }

    __device__ void claim() const {
        if (mine.second == 1) return;
        mine.second = 0;
        const i32 taken = atomic_add(p.tickets, 1);
        // Every CTA that had a ticket takes one too many: the last of those leaves the counter as the launch found it.
        if (taken == 2 * tiles() - whole_tiles() - 1) *p.tickets = 0;
        mine.ticket = taken + static_cast<i32>(gridDim.x);
    }

    // One without rows where there is nothing to do, ended when no ticket is left. Whatever the table holds, the tile
    // lies inside the matrices.
    __device__ void describe(RowTile& tile) const {
        const i32 whole = whole_tiles();
        const bool halved = mine.ticket >= whole;
        const i32 nth = halved ? whole + (mine.ticket - whole) / 2 : mine.ticket;
        tile.rows = -1;
        if (nth >= tiles()) return;
        place(tile, nth / p.panel, nth % p.panel);
        if (halved) {
            narrow(tile, (mine.ticket - whole) % 2);
        } else if (tile.rows > kCfg.wide_tokens) {
            narrow(tile, mine.second);
            mine.second = mine.second == 0 ? 1 : 2;
        }
    }

   private:
    __device__ static void narrow(RowTile& tile, i32 half) {
        tile.col += half * kCfg.narrow_columns();
        tile.cols -= half * kCfg.narrow_columns();
        if (tile.cols <= 0) tile.rows = 0;
        if (tile.cols > kCfg.narrow_columns()) tile.cols = kCfg.narrow_columns();
    }

    __device__ i32 tiles() const { return clamped(p.schedule[kNumBlocks], 0, p.max_blocks) * panels() * p.panel; }
    // Those before the ones that are handed out in halves.
    __device__ i32 whole_tiles() const {
        const i32 rest = tiles() - kSplitPerCta * static_cast<i32>(gridDim.x);
        return rest > 0 ? rest : 0;
    }

    __device__ i32 panels() const {
        const i32 col_tiles = (p.n + kCfg.columns - 1) / kCfg.columns;
        return (col_tiles + p.panel - 1) / p.panel;
    }

    // How many of the strips before this one are long: the same share of any number of them, and all in the end.
    __device__ i32 long_before(i32 strip, i32 long_blocks, i32 blocks) const {
        if (long_blocks == blocks) return strip;
        if (long_blocks == 0) return 0;
        const u32 share = static_cast<u32>(p.schedule[kLongShare]);
        return static_cast<i32>(static_cast<u64>(static_cast<u32>(strip)) * share >> 32);
    }

    // The nth strip, a row block times a panel of neighbouring column tiles; long groups and the others take turns as
    // often as they have strips. A panel is walked through all row blocks before the next, so that its weights stay in
    // L2 for all row blocks of their group.
    __device__ void place(RowTile& tile, i32 strip, i32 in_panel) const {
        const i32 blocks = clamped(p.schedule[kNumBlocks], 0, p.max_blocks);
        const i32 long_blocks = clamped(p.schedule[kLongBlocks], 0, blocks);
        const i32 before = long_before(strip, long_blocks, blocks);
        const bool is_long = long_before(strip + 1, long_blocks, blocks) > before;
        const i32 nth = is_long ? before : strip - before;
        const i32 in_list = is_long ? long_blocks : blocks - long_blocks;
        tile.rows = 0;
        if (nth / in_list >= panels()) return;  // the table holds something else than a schedule
        tile.col = (nth / in_list * p.panel + in_panel) * kCfg.columns;
        tile.cols = clamped(p.n - tile.col, 0, kCfg.columns);
        const RowBlock& block =
            Schedule{p.schedule, p.schedule_groups}.blocks()[nth % in_list + (is_long ? 0 : long_blocks)];
        tile.group = block.group;
        const i32 end_row = clamped(block.end_row, 0, p.rows);
        tile.first_row = clamped(block.first_row, 0, end_row);
        if (tile.cols > 0) tile.rows = clamped(end_row - tile.first_row, 0, kCfg.tokens);
    }
};

}  // namespace cupy_gmm
