// How the pingpong weight gradient cuts groups: columns of c into tiles, long groups into pieces, tiles into bundles;
// and how many tickets that makes. Depends on (k, n), the tuning point and a group's rows alone.
#pragma once

#include "../params.cuh"
#include "../ptx/misc.cuh"
#include "../tiles.cuh"
#include "config.cuh"

namespace cupy_gmm {

// How the columns of c are cut: tiles of kCfg.n, but where 64 would be left for the last of several tiles of 192, the
// last two have 128.
template <PingpongConfig kCfg>
struct ColumnCut {
    i32 blocks;  // of 64 columns
    i32 tiles;

    __device__ explicit ColumnCut(i32 n)
        : blocks(n / 64 + (n % 64 != 0)), tiles((blocks + kCfg.n / 64 - 1) / (kCfg.n / 64)) {}

    __device__ bool evened() const { return kCfg.n == 192 && blocks % 3 == 1 && tiles > 1; }
    __device__ i32 first(i32 tile) const { return tile * kCfg.n - (evened() && tile == tiles - 1 ? 64 : 0); }
    __device__ i32 width(i32 tile) const {
        const i32 end = tile == tiles - 1 ? blocks * 64 : first(tile + 1);
        return end - first(tile) > kNarrow ? kCfg.n : kNarrow;
    }
};

// What (k, n) and the tuning point say about every group.
template <PingpongConfig kCfg>
struct GroupCut {
    const Params& p;

    __device__ ColumnCut<kCfg> columns() const { return ColumnCut<kCfg>(p.n); }
    __device__ i32 row_tiles() const { return (p.k + kCfg.m - 1) / kCfg.m; }
    __device__ i32 row_bundles() const { return (row_tiles() + kCfg.bundle - 1) / kCfg.bundle; }
    __device__ i32 tiles() const { return row_tiles() * columns().tiles; }
    __device__ i32 pieces(i32 rows) const {
        const i32 most = p.max_slots > 1 ? p.max_slots : 1;
        const i32 pieces = pieces_of(p, rows);
        return pieces > most ? most : pieces;
    }
    __device__ bool bundled(i32 rows, i32 pieces) const { return pieces == 1 && rows <= kCfg.n_stages * kTileK; }
    __device__ i32 tickets(i32 rows, i32 pieces) const {
        return bundled(rows, pieces) ? row_bundles() * columns().tiles : pieces * tiles();
    }
};

// Of all local groups; sums over the threads of the block, of which each calls this.
struct Totals {
    i64 tickets;
    i64 slots;
    i64 rows;
    i32 longest;  // rows of the longest group
};
__device__ __forceinline__ Totals both(const Totals& a, const Totals& b) {
    return {a.tickets + b.tickets, a.slots + b.slots, a.rows + b.rows, a.longest > b.longest ? a.longest : b.longest};
}
template <PingpongConfig kCfg>
__device__ Totals sum_groups(const Params& p) {
    const GroupCut<kCfg> cut{p};
    const i32* const bounds = Schedule{p.schedule, p.schedule_groups}.bounds();
    const i64 offset = p.schedule[kGroupOffset];
    Totals sum{0, 0, 0, 0};
    for (i32 local = static_cast<i32>(threadIdx.x); local < p.groups; local += kCfg.threads()) {
        const i64 group = local + offset;
        i32 rows = 0;
        if (group >= 0 && group < p.schedule_groups) {
            const i32 first_row = clamped(bounds[group], 0, p.rows);
            rows = clamped(bounds[group + 1], first_row, p.rows) - first_row;
        }
        const i32 pieces = cut.pieces(rows);
        sum = both(sum, {cut.tickets(rows, pieces), pieces > 1 ? pieces : 0, rows, rows});
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        sum = both(sum, {warp_shfl_xor(sum.tickets, mask), warp_shfl_xor(sum.slots, mask),
                         warp_shfl_xor(sum.rows, mask), warp_shfl_xor(sum.longest, mask)});
    }
    return sum;
}

inline constexpr u32 kMostTickets = 0x7fffffff;
__device__ __forceinline__ u32 saturated(u32 a, u32 b) { return a + b < kMostTickets ? a + b : kMostTickets; }

// How many of so many CTAs begin with the longest groups: `front` percent, but where one group has most of the rows as
// few as end its tiles in the same number of whole waves.
// perf: bench/notes/0007-hopper-wgrad-pingpong.md
template <PingpongConfig kCfg>
__device__ u32 front_ctas(const Params& p, u32 ctas, const Totals& total) {
    const u32 wanted = (ctas * kCfg.front + 50) / 100;
    const u32 front = wanted > 1 ? wanted : 1;
    if (total.longest <= total.rows / 2) return front;
    const GroupCut<kCfg> cut{p};
    const u32 tickets = static_cast<u32>(cut.tickets(total.longest, cut.pieces(total.longest)));
    const u32 waves = (tickets - 1) / front + 1;
    const u32 enough = (tickets - 1) / waves + 1;
    return waves > 1 ? enough : front;
}

}  // namespace cupy_gmm
