// What the host hands to Hopper's weight gradient, and how rows of a group are loaded: the copy engine itself cuts both
// operands at the group's last row.
#pragma once

#include "../operand.cuh"
#include "../params.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "config.cuh"

namespace cupy_gmm {

// Ragged tensor maps (see kRagged) whose last coordinate counts blocks of 64 columns, so that one copy takes all that a
// stage needs (kWholeColumnBlocks; else 64 columns). For b and c: wide tiles, narrow tiles. Boxes of
// c, if there are any (kBoxStore): coordinates {0, row % 16, row / 16, column / 64, group}, or {column, row, 0, group}.
struct PingpongParams {
    TensorMap a;
    TensorMap b[2];
    TensorMap c[2];
    Params p;
};
static_assert(sizeof(PingpongParams) == 5 * 128 + 192, "mirrored by cupy_gmm/_tensormap.py");

// Loads `columns` columns from `col` on of rows [row, row + 64), zeros from row `end_row` on; a barrier is told the
// bytes of whole boxes.
__device__ __forceinline__ void load_columns(u32 target, const TensorMap* map, u32 barrier, bool whole, i32 columns,
                                             i32 col, i32 before_end, i32 end_row) {
    mbarrier_arrive_expect(barrier, columns * kLineBytes);
    if (whole) {
        tma_load_5d(target, map, barrier, 0, kRagged + before_end, end_row, kRagged, col / 64);
        return;
    }
    for (int right = 0; right < columns; right += 64) {
        tma_load_5d(target + right * kLineBytes, map, barrier, col + right, kRagged + before_end, end_row, kRagged, 0);
    }
}

}  // namespace cupy_gmm
