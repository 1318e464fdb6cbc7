// Which tile a ticket of the forward kernel stands for.
//
// Row blocks of long groups keep the tensor cores busy, those of short groups, which each need weights of their own,
// the memory: the tickets walk both lists side by side, each from its highest blocks on, so that the last tiles are
// short. A ticket is a wide tile; where the row block is too high for one, and for the last tickets, which end closer
// together then, it is one of two narrow tiles. (Of the last ones those with few tokens stay whole.)
#pragma once

#include "../params.cuh"
#include "../ptx/misc.cuh"
#include "../tiles.cuh"
#include "config.cuh"

namespace cupy_gmm {

// perf: all three bench/notes/0011-end-of-a-launch.md
inline constexpr i32 kCtasPerHalved = 2;  // for so many CTAs, one of the last wide tiles is handed out in halves
inline constexpr i32 kWholeTokens = 32;   // but none with so few tokens or less
inline constexpr int kLongAhead = 5;      // long groups take turns more often by 2^-5, so the others end the launch

// What the walking thread knows; kept in shared memory, since it has few registers.
struct RowTicket {
    i32 ticket;
    i32 second;     // 1: of two narrow tiles of this ticket, the first is announced
    u32 announced;  // tiles so far
    i32 blocks;
    i32 long_blocks;
    i32 long_strips;  // row blocks of long groups times panels
    u32 long_share;   // of the strips, while there are any, in 2^-32
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
        mine.long_strips = mine.long_blocks * mine.panels;
        const u64 share = static_cast<u32>(p.schedule[kLongShare]);
        const u64 raised = share + (share >> kLongAhead);
        mine.long_share = raised > ~0u ? ~0u : static_cast<u32>(raised);
        mine.tiles = mine.blocks * mine.panels * p.panel;
        mine.whole = clamped(mine.tiles - static_cast<i32>(gridDim.x) / kCtasPerHalved, 0, mine.tiles);
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
            share(tile, past_whole % 2);
        } else if (tile.rows > kCfg.wide_tokens) {
            narrow(tile, mine.second);
            mine.second = mine.second == 0 ? 1 : 2;
        }
    }

   private:
    // What a ticket gets of a tile that two of them stand for.
    __device__ static void share(RowTile& tile, i32 half) {
        if (tile.rows > kWholeTokens) {
            narrow(tile, half);
        } else if (half == 1) {
            tile.rows = 0;  // the other has all of it
        }
    }

    __device__ static void narrow(RowTile& tile, i32 half) {
        tile.col += half * kCfg.narrow_columns();
        tile.cols = clamped(tile.cols - half * kCfg.narrow_columns(), 0, kCfg.narrow_columns());
        if (tile.cols == 0) tile.rows = 0;
    }

    // The nth strip, a row block times a panel of neighbouring column tiles; long groups and the others take turns
    // about as often as they have strips. A panel is walked through all row blocks before the next, so that its weights
    // stay in L2 for all row blocks of their group.
    __device__ void place(RowTile& tile, i32 strip, i32 in_panel) const {
        // Long strips among those before, in 2^-32.
        const u64 handed = static_cast<u64>(static_cast<u32>(strip)) * mine.long_share;
        i32 before = clamped(static_cast<i32>(handed >> 32), 0, mine.long_strips);
        const i32 after = static_cast<i32>((handed + mine.long_share) >> 32);
        bool is_long = before < mine.long_strips && after > before;
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
