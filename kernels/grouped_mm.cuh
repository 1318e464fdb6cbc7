// Forward and input gradient: c[r] = a[r] b[group of r]. Persistent: each CTA takes output tiles from one counter until
// none is left. Instantiated by cupy_gmm/_variants.py, one symbol a (config, element type, layout of b).
#pragma once

#include "config.cuh"
#include "epilogue.cuh"
#include "operand.cuh"
#include "params.cuh"
#include "sm80/mainloop.cuh"
#include "tiles.cuh"

namespace cupy_gmm {

template <TileConfig kCfg, class T, Layout kALayout, Layout kBLayout>
__device__ __forceinline__ void grouped_mm(const Params& p) {
    using A = Operand<kCfg.tile_m, kALayout, kCfg.threads()>;
    using B = Operand<kCfg.tile_n, kBLayout, kCfg.threads()>;
    alignas(128) extern __shared__ char shared[];
    __shared__ RowTile next_tile[2];

    const RowTiles tiles(p, kCfg.tile_m, kCfg.tile_n);
    const StagedTile<kCfg> staged{reinterpret_cast<float*>(shared)};
    Accumulators<kCfg> acc;
    int turn = 0;
    if (threadIdx.x == 0) next_tile[0] = tiles.at(static_cast<i32>(blockIdx.x));
    report_status(p);
    block_sync();
    while (next_tile[turn].rows >= 0) {
        i32 claimed = 0;
        if (threadIdx.x == 0) claimed = atomic_add(p.tickets, 1) + static_cast<i32>(gridDim.x);

        const RowTile& tile = next_tile[turn];  // stays in shared memory: the registers belong to the product
        acc.clear();
        if (tile.has_product(p.groups)) {
            const A a{static_cast<const u16*>(p.a) + tile.first_row * p.a_row, p.a_row, p.a_col, tile.rows};
            const B b{static_cast<const u16*>(p.b) + tile.group * p.b_group + tile.col * p.b_col, p.b_col, p.b_row,
                      tile.cols};
            const Mainloop<kCfg, T, A, B, true> mainloop{a, b, shared, p.k, WarpPlace<kCfg>::here()};
            mainloop.run(acc);
        }
        staged.fill(acc, tile.rows);
        store<kCfg>(p, 0, tile.first_row, tile.col, tile.rows, tile.cols,
                    [&](int row, int chunk) { return staged.chunk(row, chunk); });

        turn ^= 1;
        if (threadIdx.x == 0) next_tile[turn] = tiles.at(claimed);
        block_sync();
    }
}

}  // namespace cupy_gmm
