// Which tile a ticket stands for. RowTiles: forward and input gradient, row blocks of the schedule times column tiles.
// GroupTiles: weight gradient, groups by falling length times tiles of (k, n), long groups cut into pieces.
#pragma once

#include "params.cuh"
#include "ptx/misc.cuh"

namespace cupy_gmm {

__device__ __forceinline__ i32 clamped(i32 value, i32 low, i32 high) {
    return value < low ? low : value > high ? high : value;
}

struct RowTile {
    i32 group;
    i32 first_row;
    i32 col;
    i32 rows;  // -1: no tile is left
    i32 cols;

    __device__ __forceinline__ bool ended() const { return rows < 0; }
    // Whether there is something to multiply; rows without a group are zeros.
    __device__ __forceinline__ bool has_product(i32 groups) const { return rows > 0 && group >= 0 && group < groups; }
};

// Tickets walk a panel of neighbouring column tiles through all row blocks before the next panel begins: a row block
// is read once per panel, and the weights of a panel stay in L2 for all row blocks of their group.
struct RowTiles {
    const RowBlock* blocks;
    i32 num_blocks;
    i32 parts;  // tiles that the highest block is cut into
    i32 col_tiles;
    i32 panel;
    i32 rows;
    i32 n;
    int tile_m;
    int tile_n;

    __device__ RowTiles(const Params& p, int tile_m_, int tile_n_)
        : blocks(Schedule{p.schedule, p.schedule_groups}.blocks()),
          num_blocks(clamped(p.schedule[kNumBlocks], 0, p.max_blocks)),
          parts((p.height + tile_m_ - 1) / tile_m_),
          col_tiles((p.n + tile_n_ - 1) / tile_n_),
          panel(p.panel),
          rows(p.rows),
          n(p.n),
          tile_m(tile_m_),
          tile_n(tile_n_) {}

    // Whatever the table holds, the tile lies inside the matrices. A part past its block's end has no rows.
    __device__ RowTile at(i32 ticket) const {
        const i32 row_tiles = num_blocks * parts;
        if (ticket >= row_tiles * col_tiles) return {-1, 0, 0, -1, 0};
        const i32 which = ticket / (row_tiles * panel);
        const i32 rest = ticket - which * row_tiles * panel;
        const i32 width = col_tiles - which * panel < panel ? col_tiles - which * panel : panel;
        const i32 row_tile = rest / width;
        const RowBlock block = blocks[row_tile / parts];
        const i32 col = (which * panel + rest % width) * tile_n;
        const i32 end_row = clamped(block.end_row, 0, rows);
        const i32 first_row = clamped(block.first_row, 0, end_row) + row_tile % parts * tile_m;
        return {block.group, first_row, col, clamped(end_row - first_row, 0, tile_m),
                n - col < tile_n ? n - col : tile_n};
    }
};

// check="async": one thread hands the schedule's findings on.
__device__ __forceinline__ void report_status(const Params& p, u32 thread = 0) {
    if (p.status != nullptr && blockIdx.x == 0 && threadIdx.x == thread && p.schedule[kStatus] != 0) {
        atomic_or(p.status, p.schedule[kStatus]);
    }
}

struct GroupTile {
    i32 group;      // local; -1 when no tile is left
    i32 first_row;  // of this piece
    i32 end_row;
    i32 piece;  // of `pieces`
    i32 pieces;
    i32 first_slot;  // where the partial sums of this group's pieces begin, in pieces
    i32 tile;        // index into the group's tiles of (k, n)

    __device__ __forceinline__ bool ended() const { return group < 0; }
};

// Where a tile of tile_m x tile_n lies in the group's (k, n) matrix.
struct TilePlace {
    int row;
    int col;
    int rows;
    int cols;
};

__device__ __forceinline__ i32 tiles_of_group(const Params& p, int tile_m, int tile_n) {
    return (p.k + tile_m - 1) / tile_m * ((p.n + tile_n - 1) / tile_n);
}

// Columns fastest within a panel, then rows: the panel's columns of b and the rows of a stay in L2 for the whole group.
__device__ __forceinline__ TilePlace place_of(const Params& p, const GroupTile& tile, int tile_m, int tile_n) {
    const int row_tiles = (p.k + tile_m - 1) / tile_m;
    const int col_tiles = (p.n + tile_n - 1) / tile_n;
    const int which = tile.tile / (row_tiles * p.panel);
    const int rest = tile.tile - which * row_tiles * p.panel;
    const int width = col_tiles - which * p.panel < p.panel ? col_tiles - which * p.panel : p.panel;
    const int row = rest / width * tile_m;
    const int col = (which * p.panel + rest % width) * tile_n;
    return {row, col, p.k - row < tile_m ? p.k - row : tile_m, p.n - col < tile_n ? p.n - col : tile_n};
}

// A long group is cut into pieces of p.chunk rows, of which the last one takes up to half a chunk more.
__device__ __forceinline__ i32 pieces_of(const Params& p, i32 rows) {
    const i64 pieces = (rows + static_cast<i64>(p.chunk / 2)) / p.chunk;
    return pieces > 1 ? static_cast<i32>(pieces) : 1;
}
// From the rows of a group to those of its nth piece.
__device__ __forceinline__ void cut_piece(const Params& p, i32 nth, i32 pieces, i32& first_row, i32& end_row) {
    const i64 begin = first_row + static_cast<i64>(nth) * p.chunk;
    first_row = begin < end_row ? static_cast<i32>(begin) : end_row;
    if (nth + 1 < pieces && begin + p.chunk < end_row) end_row = static_cast<i32>(begin + p.chunk);
}

// What the walking warp knows of 32 neighbouring places; kept in shared memory to leave the registers to the product.
struct GroupWindow {
    i32 first_place;
    i32 tickets_before;
    i32 slots_before;
    i32 group[32];
    i32 first_row[32];
    i32 end_row[32];
    i32 pieces[32];
    i32 tickets_end[32];  // inclusive sums over the window
    i32 slots_end[32];
};

// Places of a walk over all local groups: the groups of the schedule by falling length, then (from a multiple of 32 on)
// the local groups by id, of which only those that the schedule does not know count: they are empty.
struct Places {
    // -1 as group: none stands there.
    struct Rows {
        i32 group;
        i32 first_row;
        i32 end_row;
    };

    const Params& p;

    __device__ int first_local() const { return (p.schedule_groups + 31) / 32 * 32; }
    __device__ int count() const { return first_local() + (p.groups + 31) / 32 * 32; }

    // Whatever the table holds, the rows lie inside the matrices.
    __device__ Rows at(int place) const {
        const Schedule schedule{p.schedule, p.schedule_groups};
        const i64 offset = p.schedule[kGroupOffset];
        if (place < p.schedule_groups) {
            const i32 global = clamped(schedule.order()[place], 0, p.schedule_groups - 1);
            const i64 local = global - offset;
            if (local < 0 || local >= p.groups) return {-1, 0, 0};
            const i32 first_row = clamped(schedule.bounds()[global], 0, p.rows);
            return {static_cast<i32>(local), first_row, clamped(schedule.bounds()[global + 1], first_row, p.rows)};
        }
        const i64 local = place - first_local();
        const bool unknown = local + offset < 0 || local + offset >= p.schedule_groups;
        return {local >= 0 && local < p.groups && unknown ? static_cast<i32>(local) : -1, 0, 0};
    }
};

// Walked by one whole warp. Tickets of a CTA only rise, so a window of 32 places is scanned once and then left behind.
struct GroupTiles {
    const Params& p;
    GroupWindow& window;
    i32 tiles_per_group;

    __device__ void begin() const {
        if (lane_id() == 0) {
            window.first_place = 0;
            window.tickets_before = 0;
            window.slots_before = 0;
        }
        warp_sync();
        scan();
    }

    __device__ GroupTile at(i32 ticket) const {
        while (ticket - window.tickets_before >= window.tickets_end[31]) {
            warp_sync();
            if (lane_id() == 0) {
                window.tickets_before += window.tickets_end[31];
                window.slots_before += window.slots_end[31];
                window.first_place += 32;
            }
            warp_sync();
            if (window.first_place >= Places{p}.count()) return {-1, 0, 0, 0, 0, 0, 0};
            scan();
        }
        const i32 inside = ticket - window.tickets_before;
        const int owner = first_set_bit(warp_ballot(inside < window.tickets_end[lane_id()]));
        const i32 pieces = window.pieces[owner];
        const i32 first_slot = window.slots_before + window.slots_end[owner] - pieces;
        // No offsets lead here, only a table that somebody wrote into: rather end than leave the scratch.
        if (pieces > 1 && first_slot + pieces > p.max_slots) return {-1, 0, 0, 0, 0, 0, 0};
        const i32 nth = inside - (window.tickets_end[owner] - pieces * tiles_per_group);
        const i32 piece = nth / tiles_per_group;
        i32 first_row = window.first_row[owner];
        i32 end_row = window.end_row[owner];
        cut_piece(p, piece, pieces, first_row, end_row);
        return {window.group[owner], first_row, end_row, piece, pieces, first_slot, nth % tiles_per_group};
    }

   private:
    __device__ void scan() const {
        const int lane = lane_id();
        const Places::Rows rows = Places{p}.at(window.first_place + lane);
        const i32 pieces = rows.group < 0 ? 0 : pieces_of(p, rows.end_row - rows.first_row);
        i32 tickets = pieces * tiles_per_group;
        i32 slots = pieces > 1 ? pieces : 0;
        for (int distance = 1; distance < 32; distance *= 2) {
            const i32 tickets_below = warp_shfl_up(tickets, distance);
            const i32 slots_below = warp_shfl_up(slots, distance);
            if (lane >= distance) {
                tickets += tickets_below;
                slots += slots_below;
            }
        }
        window.group[lane] = rows.group;
        window.first_row[lane] = rows.first_row;
        window.end_row[lane] = rows.end_row;
        window.pieces[lane] = pieces;
        window.tickets_end[lane] = tickets;
        window.slots_end[lane] = slots;
        warp_sync();
    }
};

}  // namespace cupy_gmm
