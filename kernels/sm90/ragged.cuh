// What the host hands to Hopper's weight gradients, and how rows of a group are loaded: the copy engine itself cuts
// both operands at the group's last row. Used by both kernels.
#pragma once

#include "../operand.cuh"
#include "../params.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"
#include "config.cuh"

namespace cupy_gmm {

// Ragged tensor maps of a and b, boxes of 64 columns by 64 rows: see kRagged.
struct HopperWgradParams {
    TensorMap a;
    TensorMap b;
    Params p;
};
static_assert(sizeof(HopperWgradParams) == 2 * 128 + 192, "mirrored by cupy_gmm/_tensormap.py");

// The same for the pingpong kernel, but a further coordinate counts blocks of 64 columns, so that one copy takes all
// that a stage needs (kWholeColumnBlocks; else, as there, 64 columns). For b and c: wide tiles, narrow tiles. Boxes of
// c, if there are any (kBoxStore): coordinates {0, row, column / 64, group}, or {column, row, 0, group}.
struct PingpongParams {
    TensorMap a;
    TensorMap b[2];
    TensorMap c[2];
    Params p;
};
static_assert(sizeof(PingpongParams) == 5 * 128 + 192, "mirrored by cupy_gmm/_tensormap.py");

// Loads `columns` columns from `col` on of rows [row, row + 64), zeros from row `end_row` on; a barrier is told the
// bytes of whole boxes.
template <int kColumns>
__device__ __forceinline__ void load_boxes(u32 target, const TensorMap* map, u32 barrier, i32 col, i32 row,
                                           i32 end_row) {
    mbarrier_arrive_expect(barrier, kColumns * kLineBytes);
#pragma unroll
    for (int block = 0; block < kColumns / 64; ++block) {
        tma_load_4d(target + block * 64 * kLineBytes, map, barrier, col + block * 64, kRagged + (row - end_row),
                    end_row, kRagged);
    }
}
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
