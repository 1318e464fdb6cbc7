// offs -> the schedule table, on the device (layout: params.cuh). Called by cupy_gmm/_schedule.py.
// The table depends on the offsets, the block height and the granule alone: not on K, N or the number of SMs.
//
//   schedule_shared   any number of CTAs; each scans all groups into its own shared memory (a few microseconds of
//                     repeated work, no second launch) and then writes its part of the table
//   schedule_global   one CTA, for more groups than fit shared memory; `order` serves as scratch until it is filled
#include "params.cuh"
#include "ptx/misc.cuh"

namespace cupy_gmm {

inline constexpr int kScheduleThreads = 512;
inline constexpr int kScheduleWarps = kScheduleThreads / 32;
inline constexpr i64 kMaxI32 = 0x7fffffff;
inline constexpr i64 kMinI32 = -kMaxI32 - 1;

struct Sum {
    template <class T>
    __device__ static T combine(T a, T b) {
        return a + b;
    }
};
struct Max {
    template <class T>
    __device__ static T combine(T a, T b) {
        return a > b ? a : b;
    }
};

// Inclusive scan over the block in thread order, on top of `carry`; `carry` becomes the total.
template <class Op, class T>
__device__ T block_scan(T value, T& carry, T* warp_totals) {
    const int lane = lane_id();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    for (int distance = 1; distance < 32; distance *= 2) {
        const T other = warp_shfl_up(value, distance);
        if (lane >= distance) value = Op::combine(value, other);
    }
    if (lane == 31) warp_totals[warp] = value;
    block_sync();
    T before = carry;
    for (int w = 0; w < warp; ++w) before = Op::combine(before, warp_totals[w]);
    T total = carry;
    for (int w = 0; w < kScheduleWarps; ++w) total = Op::combine(total, warp_totals[w]);
    block_sync();
    carry = total;
    return Op::combine(before, value);
}

__device__ i64 load_integer(const void* base, i64 at, bool is_int64) {
    return is_int64 ? static_cast<const i64*>(base)[at] : static_cast<const i32*>(base)[at];
}

__device__ i64 raw_offset(const ScheduleParams& p, int group) {
    return load_integer(p.offs, static_cast<i64>(group) * p.offs_stride, p.offs_is_int64 != 0);
}

__device__ int blocks_of(i32 length, i32 height) {
    return static_cast<int>((length + static_cast<i64>(height) - 1) / height);
}

// bounds[0..groups] and first_block[0..groups) for all groups; returns the number of blocks with rows of groups.
__device__ int scan_groups(const ScheduleParams& p, i32* bounds, i32* first_block, i32* warp_totals, i32& status) {
    i32 last_end = 0;
    i32 blocks = 0;
    status = 0;
    if (threadIdx.x == 0) bounds[0] = 0;
    for (int base = 0; base < p.groups; base += kScheduleThreads) {
        const int group = base + static_cast<int>(threadIdx.x);
        i32 end = 0;
        if (group < p.groups) {
            const i64 raw = raw_offset(p, group);
            if (raw < 0) status |= kNegative;
            if (raw > p.rows) status |= kBeyondRows;
            if (group > 0 && raw < raw_offset(p, group - 1)) status |= kDecreasing;
            end = raw < 0 ? 0 : raw > p.rows ? p.rows : static_cast<i32>(raw);
        }
        end = block_scan<Max>(end, last_end, warp_totals);
        if (group < p.groups) bounds[group + 1] = end;
        block_sync();
        const int count = group < p.groups ? blocks_of(end - bounds[group], p.height) : 0;
        const i32 after = block_scan<Sum>(count, blocks, warp_totals);
        if (group < p.groups) first_block[group] = after - count;
    }
    block_sync();
    return blocks;
}

__device__ RowBlock group_block(const ScheduleParams& p, const i32* bounds, const i32* first_block, int index,
                                i64 group_offset) {
    int low = 0;  // the last group whose first block is <= index: empty groups share the number of their successor
    int high = p.groups - 1;
    while (low < high) {
        const int middle = low + (high - low + 1) / 2;
        if (first_block[middle] <= index) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    const i32 start = bounds[low];
    const i32 end = bounds[low + 1];
    const int blocks = blocks_of(end - start, p.height);
    const int nth = index - first_block[low];
    const int granules = blocks_of(end - start, p.granule);
    const int each = granules / blocks;
    const int longer = granules % blocks;
    const int before = nth * each + (nth < longer ? nth : longer);
    const int size = each + (nth < longer ? 1 : 0);
    const i32 first_row = start + before * p.granule;
    const i64 last_row = static_cast<i64>(first_row) + static_cast<i64>(size) * p.granule;
    const i64 local = low - group_offset;
    return RowBlock{local >= 0 && local < p.num_groups ? static_cast<i32>(local) : -1, first_row,
                    last_row < end ? static_cast<i32>(last_row) : end, size * p.granule};
}

__device__ RowBlock tail_block(const ScheduleParams& p, i32 used_rows, int nth) {
    const i64 first_row = used_rows + static_cast<i64>(nth) * p.height;
    const i64 end_row = first_row + p.height < p.rows ? first_row + p.height : p.rows;
    return RowBlock{-1, static_cast<i32>(first_row), static_cast<i32>(end_row),
                    blocks_of(static_cast<i32>(end_row - first_row), p.granule) * p.granule};
}

// Everything but the scan: header, blocks, bounds and order. `first_block` may be the memory of `order`.
__device__ void write_table(const ScheduleParams& p, const i32* bounds, const i32* first_block, int group_blocks,
                            i32 status) {
    const int thread = static_cast<int>(blockIdx.x) * kScheduleThreads + static_cast<int>(threadIdx.x);
    const int threads = static_cast<int>(gridDim.x) * kScheduleThreads;
    const i64 group_offset = p.group_offset != nullptr ? *p.group_offset : p.group_offset_value;
    const i32 used_rows = bounds[p.groups];
    const int total = group_blocks + blocks_of(p.rows - used_rows, p.height);
    const Schedule table{p.table, p.groups};
    i32* bounds_out = const_cast<i32*>(table.bounds());
    i32* order = const_cast<i32*>(table.order());
    RowBlock* blocks = const_cast<RowBlock*>(table.blocks());

    for (int index = thread; index < total && index < p.max_blocks; index += threads) {
        blocks[index] = index < group_blocks ? group_block(p, bounds, first_block, index, group_offset)
                                             : tail_block(p, used_rows, index - group_blocks);
    }
    block_sync();  // `first_block` is read; `order` may now overwrite it
    for (int group = thread; group < p.groups; group += threads) {
        const i32 length = bounds[group + 1] - bounds[group];
        int rank = 0;
        for (int other = 0; other < p.groups; ++other) {
            const i32 its = bounds[other + 1] - bounds[other];
            rank += its > length || (its == length && other < group) ? 1 : 0;
        }
        order[rank] = group;
    }
    if (bounds_out != bounds) {
        for (int i = thread; i <= p.groups; i += threads) bounds_out[i] = bounds[i];
    }
    if (blockIdx.x == 0) {
        i32* const padding = order + p.groups;
        if (padding + threadIdx.x < reinterpret_cast<i32*>(blocks)) padding[threadIdx.x] = 0;
        if (threadIdx.x == 0) {
            p.table[kNumBlocks] = total < p.max_blocks ? total : p.max_blocks;
            p.table[kStatus] = status;
            p.table[kUsedRows] = used_rows;
            p.table[kGroupOffset] = static_cast<i32>(group_offset);
            p.table[kGroups] = p.groups;
            p.table[kRows] = p.rows;
            p.table[kHeight] = p.height;
            p.table[kGranule] = p.granule;
        } else if (threadIdx.x > kGranule && threadIdx.x < kHeaderWords) {
            p.table[threadIdx.x] = 0;
        }
    }
    if (p.zeroed != nullptr) {
        for (int i = thread; i < p.zeroed_words; i += threads) p.zeroed[i] = 0;
    }
}

__device__ void build(const ScheduleParams& p, i32* bounds, i32* first_block) {
    __shared__ i32 warp_totals[kScheduleWarps];
    __shared__ i32 all_status;
    if (threadIdx.x == 0) all_status = 0;
    i32 status;
    const int group_blocks = scan_groups(p, bounds, first_block, warp_totals, status);
    if (status != 0) atomic_or(&all_status, status);
    block_sync();
    write_table(p, bounds, first_block, group_blocks, all_status);
}

// Group sizes -> end offsets; a sum outside int32 saturates.
__device__ void sum_sizes(const SizesParams& p) {
    __shared__ i64 warp_totals[kScheduleWarps];
    i64 total = 0;
    for (int base = 0; base < p.groups; base += kScheduleThreads) {
        const int group = base + static_cast<int>(threadIdx.x);
        i64 size = 0;
        if (group < p.groups) {
            size = load_integer(p.sizes, static_cast<i64>(group) * p.sizes_stride, p.sizes_are_int64 != 0);
        }
        const i64 end = block_scan<Sum>(size, total, warp_totals);
        if (group < p.groups) {
            p.offs[group] = static_cast<i32>(end < kMinI32 ? kMinI32 : end > kMaxI32 ? kMaxI32 : end);
        }
    }
}

}  // namespace cupy_gmm

// Shared memory: 2 * groups + 1 words, rounded up to 16 bytes, which is how the compiler reads them.
extern "C" __global__ void __launch_bounds__(cupy_gmm::kScheduleThreads, 1)
    schedule_shared(const __grid_constant__ cupy_gmm::ScheduleParams p) {
    alignas(16) extern __shared__ cupy_gmm::i32 schedule_storage[];
    cupy_gmm::build(p, schedule_storage, schedule_storage + p.groups + 1);
}

extern "C" __global__ void __launch_bounds__(cupy_gmm::kScheduleThreads, 1)
    schedule_global(const __grid_constant__ cupy_gmm::ScheduleParams p) {
    const cupy_gmm::Schedule table{p.table, p.groups};
    cupy_gmm::build(p, const_cast<cupy_gmm::i32*>(table.bounds()), const_cast<cupy_gmm::i32*>(table.order()));
}

// One CTA.
extern "C" __global__ void __launch_bounds__(cupy_gmm::kScheduleThreads, 1)
    offsets_of_sizes(const __grid_constant__ cupy_gmm::SizesParams p) {
    cupy_gmm::sum_sizes(p);
}
