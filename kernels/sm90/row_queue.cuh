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
    i32 blocks;
    i32 long_blocks;
    i32 panels;
    i32 tiles;  // wide ones
    i32 whole;  // those before the ones that are handed out in halves
};

template <HopperRowsConfig kCfg>
struct RowQueue {
    const Params& p;
    RowTicket& mine;

    // Takes the first ticket.
    __device__ void begin() const {
        mine.ticket = static_cast<i32>(blockIdx.x);
        mine.second = 0;
        mine.blocks = clamped(p.schedule[kNumBlocks], 0, p.max_blocks);
        mine.long_blocks = clamped(p.schedule[kLongBlocks], 0, mine.blocks);
        mine.panels = ((p.n + kCfg.columns - 1) / kCfg.columns + p.panel - 1) / p.panel;
        mine.tiles = mine.blocks * mine.panels * p.panel;
        mine.whole = clamped(mine.tiles - kSplitPerCta * static_cast<i32>(gridDim.x), 0, mine.tiles);
    }

    __device__ void claim() const {
        if (mine.second == 1) return;
        mine.second = 0;
        mine.ticket = atomic_add(p.tickets, 1) + static_cast<i32>(gridDim.x);
    }

    // One without rows where there is nothing to do, ended when no ticket is left. Whatever the table holds, the tile
    // lies inside the matrices.
    __device__ void describe(RowTile& tile) const {
        const i32 past_whole = mine.ticket - mine.whole;
        const i32 nth = past_whole >= 0 ? mine.whole + past_whole / 2 : mine.ticket;
        tile.rows = -1;
        if (nth >= mine.tiles) {
            // Every CTA that had a ticket takes one too many: the last of those leaves the counter as the launch found
            // it.
            const i32 tickets = 2 * mine.tiles - mine.whole;
            if (mine.ticket == tickets + static_cast<i32>(gridDim.x) - 1) *p.tickets = 0;
            return;
        }
        tile.rows = 0;
        place(tile, nth / p.panel, nth % p.panel);
        if (past_whole >= 0) {
            narrow(tile, past_whole % 2);
        } else if (tile.rows > kCfg.wide_tokens) {
            narrow(tile, mine.second);
            mine.second = mine.second == 0 ? 1 : 2;
        }
    }

   private:
    __device__ static void narrow(RowTile& tile, i32 half) {
        tile.col += half * kCfg.narrow_columns();
        tile.cols = clamped(tile.cols - half * kCfg.narrow_columns(), 0, kCfg.narrow_columns());
        if (tile.cols == 0) tile.rows = 0;
    }

    // The nth strip, a row block times a panel of neighbouring column tiles; long groups and the others take turns as
    // often as they have strips. A panel is walked through all row blocks before the next, so that its weights stay in
    // L2 for all row blocks of their group.
    __device__ void place(RowTile& tile, i32 strip, i32 in_panel) const {
        const u64 share = static_cast<u32>(p.schedule[kLongShare]);
        const u64 handed = static_cast<u32>(strip) * share;  // long strips among those before, in 2^-32
        i32 before = static_cast<i32>(handed >> 32);
        bool is_long = static_cast<i32>((handed + share) >> 32) > before;
        if (mine.long_blocks == mine.blocks) {
            before = strip;
            is_long = true;
        }
        const i32 nth = is_long ? before : strip - before;
        const i32 in_list = is_long ? mine.long_blocks : mine.blocks - mine.long_blocks;
        if (in_list == 0 || nth / in_list >= mine.panels) return;  // the table holds something else than a schedule
        tile.col = (nth / in_list * p.panel + in_panel) * kCfg.columns;
        tile.cols = clamped(p.n - tile.col, 0, kCfg.columns);
        if (tile.cols == 0) return;
        const RowBlock& block =
            Schedule{p.schedule, p.schedule_groups}.blocks()[nth % in_list + (is_long ? 0 : mine.long_blocks)];
        tile.group = block.group;
        const i32 end_row = clamped(block.end_row, 0, p.rows);
        tile.first_row = clamped(block.first_row, 0, end_row);
        tile.rows = clamped(end_row - tile.first_row, 0, kCfg.tokens);
    }
};

}  // namespace cupy_gmm
