// Weight gradient: c[g] = a[rows of g]^T b[rows of g]; rows are the reduction axis, an empty group gets zeros.
// A group longer than `chunk` rows is cut into pieces whose partial sums are added in order by the piece that arrives
// last: the same bits on every run. Instantiated by cupy_gmm/_variants.py.
#pragma once

#include "config.cuh"
#include "epilogue.cuh"
#include "operand.cuh"
#include "params.cuh"
#include "pieces.cuh"
#include "sm80/mainloop.cuh"
#include "tiles.cuh"

namespace cupy_gmm {

// Counts this piece in; true in the CTA whose piece is the last, which then sees the sums of all.
__device__ __forceinline__ bool arrive_last(i32* arrivals, i32 pieces) {
    __shared__ i32 arrived;
    fence_device();
    block_sync();
    if (threadIdx.x == 0) arrived = atomic_add(arrivals, 1);
    block_sync();
    fence_device();
    return arrived == pieces - 1;
}

// Stores the tile, or adds it to the pieces of its group and stores their sum where this piece is the last.
template <TileConfig kCfg>
__device__ __forceinline__ void finish_tile(const Params& p, const GroupTile& tile, const StagedTile<kCfg>& staged,
                                            i32 tiles_per_group) {
    const TilePlace at = place_of(p, tile, kCfg.tile_m, kCfg.tile_n);
    const auto staged_chunk = [&](int r, int chunk) { return staged.chunk(r, chunk); };
    if (tile.pieces == 1) {
        store<kCfg>(p, tile.group, at.row, at.col, at.rows, at.cols, staged_chunk);
        return;
    }
    const i64 slot = static_cast<i64>(tile.first_slot) * tiles_per_group + tile.tile;
    const Pieces<kCfg.tile_m, kCfg.tile_n> pieces(p, slot, tiles_per_group);
    for_each_chunk<kCfg>(at.rows, at.cols,
                         [&](int r, int chunk) { pieces.save(tile.piece, r, chunk, staged_chunk(r, chunk)); });
    if (arrive_last(p.tickets + kTicketWords + slot, tile.pieces)) {
        store<kCfg>(p, tile.group, at.row, at.col, at.rows, at.cols,
                    [&](int r, int chunk) { return pieces.sum(tile.pieces, r, chunk); });
    }
}

template <TileConfig kCfg, class T, Layout kALayout, Layout kBLayout>
__device__ __forceinline__ void grouped_mm_wgrad(const Params& p) {
    using A = Operand<kCfg.tile_m, kALayout, kCfg.threads()>;
    using B = Operand<kCfg.tile_n, kBLayout, kCfg.threads()>;
    alignas(128) extern __shared__ char shared[];
    __shared__ GroupTile next_tile[2];
    __shared__ GroupWindow window;

    const i32 tiles_per_group = tiles_of_group(p, kCfg.tile_m, kCfg.tile_n);
    const bool first_warp = threadIdx.x < 32;
    const GroupTiles tiles{p, window, tiles_per_group};
    const StagedTile<kCfg> staged{reinterpret_cast<float*>(shared)};
    Accumulators<kCfg> acc;
    int turn = 0;

    if (first_warp) {
        tiles.begin();
        const GroupTile tile = tiles.at(static_cast<i32>(blockIdx.x));
        if (threadIdx.x == 0) next_tile[0] = tile;
    }
    report_status(p);
    block_sync();
    while (next_tile[turn].group >= 0) {
        i32 claimed = 0;
        if (threadIdx.x == 0) claimed = atomic_add(p.tickets, 1) + static_cast<i32>(gridDim.x);

        const GroupTile& tile = next_tile[turn];  // stays in shared memory: the registers belong to the product
        acc.clear();
        if (tile.end_row > tile.first_row) {
            const TilePlace at = place_of(p, tile, kCfg.tile_m, kCfg.tile_n);
            const u16* a_base = static_cast<const u16*>(p.a) + tile.first_row * p.a_row + at.row * p.a_col;
            const u16* b_base = static_cast<const u16*>(p.b) + tile.first_row * p.b_row + at.col * p.b_col;
            const A a{a_base, p.a_col, p.a_row, at.rows};
            const B b{b_base, p.b_col, p.b_row, at.cols};
            const Mainloop<kCfg, T, A, B, false> mainloop{a, b, shared, tile.end_row - tile.first_row,
                                                          WarpPlace<kCfg>::here()};
            mainloop.run(acc);
        }
        if (tile.end_row > tile.first_row || (p.flags & kAccumulate) == 0) {
            staged.fill(acc, kCfg.tile_m);
            finish_tile<kCfg>(p, tile, staged, tiles_per_group);
        }

        turn ^= 1;
        if (first_warp) {
            const GroupTile next = tiles.at(warp_shfl(claimed, 0));
            if (threadIdx.x == 0) next_tile[turn] = next;
        }
        block_sync();
    }
}

}  // namespace cupy_gmm
