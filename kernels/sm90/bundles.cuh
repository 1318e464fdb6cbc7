// Which tiles a ticket of the pingpong weight gradient stands for: a bundle of neighbouring tiles with the same n side.
// Groups are walked by falling length from either end; tickets are numbered from that end.
#pragma once

#include "../params.cuh"
#include "../ptx/misc.cuh"
#include "../tiles.cuh"
#include "config.cuh"
#include "cut.cuh"

namespace cupy_gmm {

struct Bundle {
    i32 group;      // local; -1 when none is left
    i32 first_row;  // of a and b
    i32 end_row;
    i32 row;  // of c, where the first tile begins; the others follow
    i32 col;
    i32 cols;  // that are computed: whole boxes of 64
    i32 count;
    i32 piece;  // of `pieces`
    i32 pieces;
    i32 slot;  // first piece of the one tile of this bundle, counted in tiles
};

// What the walking warp knows of 32 neighbouring places; kept in shared memory as in GroupWindow.
struct BundleWindow {
    i32 from_back;
    i32 total_slots;
    i32 first_place;
    u32 tickets_before;
    u32 slots_before;
    i32 group[32];
    i32 first_row[32];
    i32 end_row[32];
    i32 pieces[32];
    u32 tickets_end[32];  // inclusive sums over the window
    u32 slots_end[32];
    Bundle bundle;  // the last one that was asked for
};

// Walked by one whole warp; its tickets only rise. From the back, places are walked in falling order.
template <PingpongConfig kCfg>
struct BundleWalk {
    const Params& p;
    BundleWindow& window;
    GroupCut<kCfg> cut;

    __device__ void begin(bool from_back, i32 total_slots) const {
        if (lane_id() == 0) {
            window.from_back = from_back;
            window.total_slots = total_slots;
            window.first_place = -32;  // before the first window, which the first ticket moves on to
            window.tickets_before = 0;
            window.slots_before = 0;
            window.tickets_end[31] = 0;
            window.slots_end[31] = 0;
        }
        warp_sync();
    }

    // Leaves the bundle in the window.
    __device__ void find(u32 ticket) const {
        const Bundle bundle = at(ticket);
        if (lane_id() == 0) window.bundle = bundle;
        warp_sync();
    }

   private:
    struct Place {
        i32 row;
        i32 col;
    };

    __device__ Bundle at(u32 ticket) const {
        while (ticket - window.tickets_before >= window.tickets_end[31]) {
            warp_sync();
            if (lane_id() == 0) {
                window.tickets_before += window.tickets_end[31];
                window.slots_before += window.slots_end[31];
                window.first_place += 32;
            }
            warp_sync();
            if (window.first_place >= Places{p}.count()) return {-1, 0, 0, 0, 0, 0, 0, 0, 0, 0};
            scan();
        }
        const u32 inside = ticket - window.tickets_before;
        const int owner = first_set_bit(warp_ballot(inside < window.tickets_end[lane_id()]));
        const i32 before = static_cast<i32>(inside - (owner > 0 ? window.tickets_end[owner - 1] : 0u));
        const i32 pieces = window.pieces[owner];
        const i32 slots_end = static_cast<i32>(window.slots_before + window.slots_end[owner]);
        const i32 first_slot = window.from_back ? window.total_slots - slots_end : slots_end - pieces;
        // No offsets lead here, only a table that somebody wrote into: rather end than leave the scratch.
        if (pieces > 1 && (first_slot < 0 || first_slot > p.max_slots - pieces)) return {-1, 0, 0, 0, 0, 0, 0, 0, 0, 0};
        const i32 rows = window.end_row[owner] - window.first_row[owner];
        const i32 nth = window.from_back ? cut.tickets(rows, pieces) - 1 - before : before;
        Bundle bundle{window.group[owner], window.first_row[owner], window.end_row[owner], 0, 0, 0, 1, 0, pieces, 0};
        if (cut.bundled(rows, pieces)) {
            const Place at = walk(nth, cut.row_bundles(), kCfg.bundle);
            const i32 each = cut.row_tiles() / cut.row_bundles();
            const i32 longer = cut.row_tiles() % cut.row_bundles();
            bundle.row = (at.row * each + (at.row < longer ? at.row : longer)) * kCfg.m;
            bundle.count = each + (at.row < longer ? 1 : 0);
            set_columns(bundle, at.col);
        } else {
            const i32 tile = nth % cut.tiles();
            const Place at = walk(tile, cut.row_tiles(), 1);
            bundle.row = at.row * kCfg.m;
            set_columns(bundle, at.col);
            bundle.piece = nth / cut.tiles();
            bundle.slot = first_slot * cut.tiles() + tile;
            if (pieces > 1) {
                const i64 first_row = bundle.first_row + static_cast<i64>(bundle.piece) * p.chunk;
                bundle.first_row = first_row < bundle.end_row ? static_cast<i32>(first_row) : bundle.end_row;
                if (first_row + p.chunk < bundle.end_row) bundle.end_row = static_cast<i32>(first_row + p.chunk);
            }
        }
        return bundle;
    }

    __device__ void set_columns(Bundle& bundle, i32 tile) const {
        bundle.col = cut.columns().first(tile);
        bundle.cols = cut.columns().width(tile);
    }

    // The longer side of the matrix is cut into panels, the shorter one is walked from end to end for each of them: a
    // panel of one operand and all columns of the other stay in L2.
    __device__ Place walk(i32 nth, i32 rows, i32 tiles_per_row) const {
        const bool by_rows = p.k > p.n;
        const i32 row_panel = p.panel * kCfg.n / (kCfg.m * tiles_per_row);
        const i32 panel = by_rows ? (row_panel > 0 ? row_panel : 1) : p.panel;
        const i32 extent = by_rows ? rows : cut.columns().tiles;
        const i32 other = by_rows ? cut.columns().tiles : rows;
        const i32 which = nth / (other * panel);
        const i32 rest = nth - which * other * panel;
        const i32 width = extent - which * panel < panel ? extent - which * panel : panel;
        const i32 along = which * panel + rest % width;
        return by_rows ? Place{along, rest / width} : Place{rest / width, along};
    }

    __device__ void scan() const {
        const int lane = lane_id();
        const int index = window.first_place + lane;
        const Places::Rows rows = Places{p}.at(window.from_back ? Places{p}.count() - 1 - index : index);
        const i32 length = rows.end_row - rows.first_row;
        const i32 pieces = rows.group < 0 ? 0 : cut.pieces(length);
        u32 tickets = rows.group < 0 ? 0u : static_cast<u32>(cut.tickets(length, pieces));
        u32 slots = pieces > 1 ? static_cast<u32>(pieces) : 0u;
        for (int distance = 1; distance < 32; distance *= 2) {
            const u32 tickets_below = warp_shfl_up(tickets, distance);
            const u32 slots_below = warp_shfl_up(slots, distance);
            if (lane >= distance) {
                tickets = saturated(tickets, tickets_below);
                slots = saturated(slots, slots_below);
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
