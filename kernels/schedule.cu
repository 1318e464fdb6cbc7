// offs, or sizes -> the schedule table, on the device (layout: params.cuh). Called by cupy_gmm/_schedule.py.
// The table depends on the offsets and the shape of the blocks alone: not on K, N or the number of SMs.
//
//   schedule_shared   any number of CTAs; each scans all groups into its own shared memory (a few microseconds of
//                     repeated work, no second launch) and then writes its part of the table
//   schedule_global   one CTA, for more groups than fit shared memory
#include "params.cuh"
#include "ptx/misc.cuh"
#include "row_blocks.cuh"
#include "scan.cuh"

namespace cupy_gmm {

inline constexpr int kScheduleThreads = 512;
inline constexpr int kScheduleWarps = kScheduleThreads / 32;
inline constexpr i64 kMaxI32 = 0x7fffffff;
inline constexpr i64 kMinI32 = -kMaxI32 - 1;

__device__ i64 load_integer(const void* base, i64 at, bool is_int64) {
    return is_int64 ? static_cast<const i64*>(base)[at] : static_cast<const i32*>(base)[at];
}

__device__ i64 given(const ScheduleParams& p, int group) {
    return load_integer(p.offs, static_cast<i64>(group) * p.offs_stride, p.offs_is_int64 != 0);
}

// A sum of sizes as an offset.
__device__ i64 saturated(i64 sum) { return sum < kMinI32 ? kMinI32 : sum > kMaxI32 ? kMaxI32 : sum; }

struct Totals {
    i32 blocks;  // of groups
    i32 groups;  // with rows
    i32 status;  // bits that this thread found
};

// bounds[0..groups] for all groups.
__device__ Totals scan_groups(const ScheduleParams& p, i32* bounds, i32* warp_totals) {
    __shared__ i64 warp_sums[kScheduleWarps];
    i64 sum = 0;  // of sizes
    i32 last_end = 0;
    Totals totals{0, 0, 0};
    if (threadIdx.x == 0) bounds[0] = 0;
    for (int base = 0; base < p.groups; base += kScheduleThreads) {
        const int group = base + static_cast<int>(threadIdx.x);
        i64 raw = group < p.groups ? given(p, group) : 0;
        i64 before = 0;  // the same of the group before
        if (p.offs_are_sizes != 0) {
            const i64 total = block_scan<Sum, kScheduleWarps>(raw, sum, warp_sums);
            before = saturated(total - raw);
            raw = saturated(total);
        } else if (group > 0 && group < p.groups) {
            before = given(p, group - 1);
        }
        i32 end = 0;
        if (group < p.groups) {
            if (raw < 0) totals.status |= kNegative;
            if (raw > p.rows) totals.status |= kBeyondRows;
            if (group > 0 && raw < before) totals.status |= kDecreasing;
            end = raw < 0 ? 0 : raw > p.rows ? p.rows : static_cast<i32>(raw);
        }
        end = block_scan<Max, kScheduleWarps>(end, last_end, warp_totals);
        if (group < p.groups) bounds[group + 1] = end;
        block_sync();
        const i32 length = group < p.groups ? end - bounds[group] : 0;
        block_scan<Sum, kScheduleWarps>(blocks_of(p, length), totals.blocks, warp_totals);
        block_scan<Sum, kScheduleWarps>(length > 0 ? 1 : 0, totals.groups, warp_totals);
    }
    block_sync();
    return totals;
}

// Every group's standing, found once; where there is no room for them, whoever wants one finds it.
struct Standings {
    const ScheduleParams& p;
    const i32* bounds;
    Standing* found;  // or null
    i32 groups_with_rows;

    __device__ Standing find(int group) const {
        return standing_of(p, bounds[group + 1] - bounds[group], bounds[p.groups], groups_with_rows);
    }

    __device__ Standing operator[](int group) const { return found != nullptr ? found[group] : find(group); }

    // The whole block.
    __device__ void fill() const {
        if (found == nullptr) return;
        for (int group = static_cast<int>(threadIdx.x); group < p.groups; group += kScheduleThreads) {
            found[group] = find(group);
        }
        block_sync();
    }
};

// A warp ranks one group among all of them, then writes its blocks.
__device__ void write_group(const ScheduleParams& p, const i32* bounds, const Standings& standings, int group,
                            i64 group_offset, i32* order, RowBlock* blocks) {
    const int lane = lane_id();
    const i32 start = bounds[group];
    const i32 end = bounds[group + 1];
    const Standing own = standings[group];
    int longer = 0;  // groups that come before this one by falling length
    int before = 0;  // blocks of the groups that come before it in the table
    for (int other = lane; other < p.groups; other += 32) {
        const i32 length = bounds[other + 1] - bounds[other];
        const bool by_length = length > end - start || (length == end - start && other < group);
        longer += by_length ? 1 : 0;
        if (p.by_height == 0) {
            before += other < group ? blocks_of(p, length) : 0;
        } else {
            const Standing its = standings[other];
            before += (its.rank != own.rank ? its.rank > own.rank : by_length) ? its.blocks : 0;
        }
    }
    for (int mask = 16; mask > 0; mask /= 2) {
        longer += warp_shfl_xor(longer, mask);
        before += warp_shfl_xor(before, mask);
    }
    if (lane == 0) order[longer] = group;
    const i64 local = group - group_offset;
    const int count = own.blocks;
    for (int nth = lane; nth < count && before + nth < p.max_blocks; nth += 32) {
        RowBlock block = nth_block(p, start, end, count, nth);
        if (local >= 0 && local < p.num_groups) block.group = static_cast<i32>(local);
        blocks[before + nth] = block;
    }
}

// Blocks of long groups: they stand first in a table by height.
__device__ i32 count_long_blocks(const ScheduleParams& p, const Standings& standings, const Totals& totals,
                                 i32* warp_totals) {
    if (p.by_height == 0) return totals.blocks;
    i32 mine = 0;
    for (int group = static_cast<int>(threadIdx.x); group < p.groups; group += kScheduleThreads) {
        const Standing standing = standings[group];
        if (standing.is_long()) mine += standing.blocks;
    }
    i32 sum = 0;
    block_scan<Sum, kScheduleWarps>(mine, sum, warp_totals);
    return sum;
}

// part / whole in 2^-32, rounded up, so that no multiple of it falls short.
__device__ u32 share_of(i32 part, i32 whole) {
    if (part >= whole) return 0;
    return static_cast<u32>(((static_cast<u64>(static_cast<u32>(part)) << 32) + whole - 1) / whole);
}

__device__ void write_header(const ScheduleParams& p, const i32* bounds, const Totals& totals, i32 group_offset,
                             i32 blocks, i32 long_blocks) {
    if (threadIdx.x == 0) {
        p.table[kNumBlocks] = blocks < p.max_blocks ? blocks : p.max_blocks;
        p.table[kStatus] = totals.status;
        p.table[kUsedRows] = bounds[p.groups];
        p.table[kGroupOffset] = group_offset;
        p.table[kGroups] = p.groups;
        p.table[kRows] = p.rows;
        p.table[kHeight] = p.height;
        p.table[kGranule] = p.granule;
        p.table[kLongBlocks] = long_blocks;
        p.table[kLongShare] = static_cast<i32>(share_of(long_blocks, blocks));
    } else if (threadIdx.x > kLongShare && threadIdx.x < kHeaderWords) {
        p.table[threadIdx.x] = 0;
    }
}

__device__ void build(const ScheduleParams& p, i32* bounds, Standing* found) {
    __shared__ i32 warp_totals[kScheduleWarps];
    __shared__ i32 all_status;
    if (threadIdx.x == 0) all_status = 0;
    Totals totals = scan_groups(p, bounds, warp_totals);
    if (totals.status != 0) atomic_or(&all_status, totals.status);
    block_sync();
    totals.status = all_status;
    const Standings standings{p, bounds, found, totals.groups};
    standings.fill();

    const int thread = static_cast<int>(blockIdx.x) * kScheduleThreads + static_cast<int>(threadIdx.x);
    const int threads = static_cast<int>(gridDim.x) * kScheduleThreads;
    const i64 group_offset = p.group_offset != nullptr ? *p.group_offset : p.group_offset_value;
    const i32 used_rows = bounds[p.groups];
    const int all_blocks = totals.blocks + parts_of(p.rows - used_rows, p.height);
    const Schedule table{p.table, p.groups};
    i32* const bounds_out = const_cast<i32*>(table.bounds());
    i32* const order = const_cast<i32*>(table.order());
    RowBlock* const blocks = const_cast<RowBlock*>(table.blocks());

    for (int group = thread / 32; group < p.groups; group += threads / 32) {
        write_group(p, bounds, standings, group, group_offset, order, blocks);
    }
    for (int index = totals.blocks + thread; index < all_blocks && index < p.max_blocks; index += threads) {
        blocks[index] = tail_block(p, used_rows, index - totals.blocks);
    }
    if (bounds_out != bounds) {
        for (int i = thread; i <= p.groups; i += threads) bounds_out[i] = bounds[i];
    }
    if (blockIdx.x == 0) {
        i32* const padding = order + p.groups;
        if (padding + threadIdx.x < reinterpret_cast<i32*>(blocks)) padding[threadIdx.x] = 0;
        const i32 long_blocks = count_long_blocks(p, standings, totals, warp_totals);
        write_header(p, bounds, totals, static_cast<i32>(group_offset), all_blocks, long_blocks);
    }
    if (p.zeroed != nullptr) {
        for (int i = thread; i < p.zeroed_words; i += threads) p.zeroed[i] = 0;
    }
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
        const i64 end = block_scan<Sum, kScheduleWarps>(size, total, warp_totals);
        if (group < p.groups) {
            p.offs[group] = static_cast<i32>(saturated(end));
        }
    }
}

}  // namespace cupy_gmm

// Shared memory: groups + 1 words, rounded up to 16 bytes, which is how the compiler reads them; by height, a Standing
// for each group behind them.
extern "C" __global__ void __launch_bounds__(cupy_gmm::kScheduleThreads, 1)
    schedule_shared(const __grid_constant__ cupy_gmm::ScheduleParams p) {
    alignas(16) extern __shared__ cupy_gmm::i32 schedule_storage[];
    auto* const standings = reinterpret_cast<cupy_gmm::Standing*>(schedule_storage + (p.groups + 1 + 3) / 4 * 4);
    cupy_gmm::build(p, schedule_storage, p.by_height != 0 ? standings : nullptr);
}

extern "C" __global__ void __launch_bounds__(cupy_gmm::kScheduleThreads, 1)
    schedule_global(const __grid_constant__ cupy_gmm::ScheduleParams p) {
    const cupy_gmm::Schedule table{p.table, p.groups};
    cupy_gmm::build(p, const_cast<cupy_gmm::i32*>(table.bounds()), nullptr);
}

// One CTA.
extern "C" __global__ void __launch_bounds__(cupy_gmm::kScheduleThreads, 1)
    offsets_of_sizes(const __grid_constant__ cupy_gmm::SizesParams p) {
    cupy_gmm::sum_sizes(p);
}
