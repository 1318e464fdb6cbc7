// How a group of rows is cut into the row blocks of a schedule, and which group's blocks come first.
#pragma once

#include "params.cuh"

namespace cupy_gmm {

// So many parts of `part` rows hold `length` rows. Unsigned, as the sum may pass 2^31.
__device__ int parts_of(i32 length, i32 part) {
    return static_cast<int>((static_cast<u32>(length) + static_cast<u32>(part) - 1) / static_cast<u32>(part));
}

// A group of at most `height` rows stays whole; a longer one is cut into blocks of at most `split` rows.
__device__ int blocks_of(const ScheduleParams& p, i32 length) {
    return parts_of(length, length <= p.height ? p.height : p.split);
}

// The nth of `blocks` nearly equal blocks of rows [start, end).
__device__ RowBlock nth_block(const ScheduleParams& p, i32 start, i32 end, int blocks, int nth) {
    const int granules = parts_of(end - start, p.granule);
    const int each = granules / blocks;
    const int longer = granules % blocks;
    const int before = nth * each + (nth < longer ? nth : longer);
    const int size = each + (nth < longer ? 1 : 0);
    const i32 first_row = start + before * p.granule;
    const i64 last_row = static_cast<i64>(first_row) + static_cast<i64>(size) * p.granule;
    return RowBlock{-1, first_row, last_row < end ? static_cast<i32>(last_row) : end, size * p.granule};
}

__device__ RowBlock tail_block(const ScheduleParams& p, i32 used_rows, int nth) {
    const i64 first_row = used_rows + static_cast<i64>(nth) * p.height;
    const i64 end_row = first_row + p.height < p.rows ? first_row + p.height : p.rows;
    return RowBlock{-1, static_cast<i32>(first_row), static_cast<i32>(end_row),
                    parts_of(static_cast<i32>(end_row - first_row), p.granule) * p.granule};
}

// What all others want to know of a group for a table by height.
struct Standing {
    static constexpr u32 kLong = 1u << 31;

    i32 blocks;
    u32 rank;  // the greater comes first: of a long group, then by the granules of the highest block

    __device__ bool is_long() const { return (rank & kLong) != 0; }
};

// A group is long if it is no shorter than the mean of those that have rows.
__device__ Standing standing_of(const ScheduleParams& p, i32 length, i32 used_rows, i32 groups_with_rows) {
    const i32 blocks = blocks_of(p, length);
    const i32 granules = blocks > 0 ? parts_of(parts_of(length, p.granule), blocks) : 0;
    const bool is_long = static_cast<i64>(length) * groups_with_rows >= used_rows;
    return {blocks, static_cast<u32>(granules) | (is_long ? Standing::kLong : 0)};
}

}  // namespace cupy_gmm
