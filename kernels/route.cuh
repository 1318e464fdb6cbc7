// Stable counting sort of assignments by expert. Included by routing.cu; knows nothing of the rows that move later.
//
//   one CTA        route_single   all of it, for at most kSingleThreads * kItems assignments
//   many CTAs      route_count    histogram of each chunk of assignments
//                  route_scan     for each expert: sums over the chunks before, and the total
//                  route_place    scan over experts, then each chunk hands out its positions in order
//
// Bucket `experts` collects the dropped assignments, so they end up behind all others, in order. Within a chunk the
// warps take turns; within a warp match.any ranks equal buckets. No float, no global atomic: the order is exact.
#pragma once

#include "ptx/misc.cuh"
#include "ptx/types.cuh"

namespace cupy_gmm {

inline constexpr int kSingleThreads = 1024;
inline constexpr int kChunkThreads = 256;
inline constexpr int kScanThreads = 1024;
inline constexpr int kItems = 4;  // assignments of a thread in one round
inline constexpr int kMaxExperts = 8192;

struct RouteParams {
    const void* ids;  // (tokens, slots) int32 or int64
    i64 token_stride;
    i64 slot_stride;
    i32* order;       // (assignments,)
    i32* inverse;     // (assignments,)
    i32* offs;        // (experts,)
    i32* counts;      // (experts,)
    i32* partials;    // (chunks, experts + 1), not used by route_single
    i32 assignments;  // tokens * slots
    i32 slots;
    i32 experts;
    i32 chunk;  // assignments of one CTA
    i32 chunks;
    i32 ids_are_int64;
};
static_assert(sizeof(RouteParams) == 88, "mirrored by cupy_gmm/_rowwise.py");

// Shared memory: one counter a bucket, then the warp sums of a scan; route_scan: one sum a thread.
__device__ __forceinline__ i32* route_shared() {
    alignas(16) extern __shared__ char shared_bytes[];
    return reinterpret_cast<i32*>(shared_bytes);
}
static_assert((kMaxExperts + 1 + 32) * 4 <= 48 * 1024, "the counters fit the shared memory that needs no opt-in");

// The bucket of an assignment; -1 at and past `end`.
__device__ __forceinline__ i32 bucket_of(const RouteParams& p, i64 index, i64 end) {
    if (index >= end) return -1;
    const u32 token = static_cast<u32>(index) / static_cast<u32>(p.slots);
    const u32 slot = static_cast<u32>(index) - token * static_cast<u32>(p.slots);
    const i64 at = token * p.token_stride + slot * p.slot_stride;
    const i64 id = p.ids_are_int64 ? static_cast<const i64*>(p.ids)[at] : static_cast<const i32*>(p.ids)[at];
    return id >= 0 && id < p.experts ? static_cast<i32>(id) : p.experts;
}

// Warp w of the CTA takes 32 * kItems assignments from first + w * 32 * kItems on, lane by lane.
__device__ __forceinline__ i64 item_index(i64 first, int item) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    return first + (warp * kItems + item) * 32 + lane_id();
}

__device__ __forceinline__ void load_round(const RouteParams& p, i64 first, i64 end, i32 (&bucket)[kItems]) {
#pragma unroll
    for (int item = 0; item < kItems; ++item) bucket[item] = bucket_of(p, item_index(first, item), end);
}

template <int kThreads>
__device__ __forceinline__ void clear(i32* counters, int count) {
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) counters[i] = 0;
}

// values[i] becomes the sum of all values before it; `warp_sums` has 32 words.
template <int kThreads>
__device__ __forceinline__ void exclusive_scan(i32* values, int count, i32* warp_sums) {
    const int thread = static_cast<int>(threadIdx.x);
    const int share = (count + kThreads - 1) / kThreads;
    const int first = thread * share < count ? thread * share : count;
    const int last = first + share < count ? first + share : count;
    i32 sum = 0;
    for (int i = first; i < last; ++i) sum += values[i];
    i32 before = sum;
    for (int distance = 1; distance < 32; distance *= 2) {
        const i32 other = warp_shfl_up(before, distance);
        if (lane_id() >= distance) before += other;
    }
    if (lane_id() == 31) warp_sums[thread / 32] = before;
    before -= sum;
    block_sync();
    for (int warp = 0; warp < thread / 32; ++warp) before += warp_sums[warp];
    for (int i = first; i < last; ++i) {
        const i32 value = values[i];
        values[i] = before;
        before += value;
    }
    block_sync();
}

// Positions of one round, in assignment order. `next[b]` is the next free position of bucket b.
template <int kThreads>
__device__ __forceinline__ void place_round(const RouteParams& p, i64 first, i64 end, i32* next,
                                            const i32 (&bucket)[kItems]) {
    u32 peers[kItems];
    i32 position[kItems];
#pragma unroll
    for (int item = 0; item < kItems; ++item) peers[item] = warp_match_any(bucket[item]);
    const u32 lanes_below = (1u << lane_id()) - 1u;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    for (int turn = 0; turn < kThreads / 32 && first + turn * 32 * kItems < end; ++turn) {
        if (warp == turn) {
#pragma unroll
            for (int item = 0; item < kItems; ++item) {
                const int leader = first_set_bit(peers[item]);
                i32 start = 0;
                if (lane_id() == leader && bucket[item] >= 0) {
                    start = next[bucket[item]];
                    next[bucket[item]] = start + popcount(peers[item]);
                }
                warp_sync();  // the next item's leader may be another lane
                position[item] = warp_shfl(start, leader) + popcount(peers[item] & lanes_below);
            }
        }
        block_sync();
    }
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
        // A position out of range means that the ids changed between the kernels.
        if (bucket[item] < 0 || static_cast<u32>(position[item]) >= static_cast<u32>(p.assignments)) continue;
        const i64 index = item_index(first, item);
        p.order[position[item]] = static_cast<i32>(index);
        p.inverse[index] = bucket[item] < p.experts ? position[item] : -1;
    }
}

}  // namespace cupy_gmm

extern "C" __global__ void __launch_bounds__(cupy_gmm::kSingleThreads)
    route_single(const __grid_constant__ cupy_gmm::RouteParams p) {
    using namespace cupy_gmm;
    i32* next = route_shared();
    i32* warp_sums = next + p.experts + 1;
    i32 bucket[kItems];
    load_round(p, 0, p.assignments, bucket);
    clear<kSingleThreads>(next, p.experts + 1);
    block_sync();
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
        if (bucket[item] >= 0) atomic_add(&next[bucket[item]], 1);
    }
    block_sync();
    for (int i = static_cast<int>(threadIdx.x); i < p.experts; i += kSingleThreads) p.counts[i] = next[i];
    block_sync();
    exclusive_scan<kSingleThreads>(next, p.experts + 1, warp_sums);
    for (int i = static_cast<int>(threadIdx.x); i < p.experts; i += kSingleThreads) p.offs[i] = next[i + 1];
    block_sync();
    place_round<kSingleThreads>(p, 0, p.assignments, next, bucket);
}

extern "C" __global__ void __launch_bounds__(cupy_gmm::kChunkThreads)
    route_count(const __grid_constant__ cupy_gmm::RouteParams p) {
    using namespace cupy_gmm;
    i32* counters = route_shared();
    const int buckets = p.experts + 1;
    const i64 first = static_cast<i64>(blockIdx.x) * p.chunk;
    const i64 end = first + p.chunk < p.assignments ? first + p.chunk : p.assignments;
    clear<kChunkThreads>(counters, buckets);
    block_sync();
    for (i64 round = first; round < end; round += kChunkThreads * kItems) {
        i32 bucket[kItems];
        load_round(p, round, end, bucket);
#pragma unroll
        for (int item = 0; item < kItems; ++item) {
            if (bucket[item] >= 0) atomic_add(&counters[bucket[item]], 1);
        }
    }
    block_sync();
    i32* row = p.partials + static_cast<i64>(blockIdx.x) * buckets;
    for (int i = static_cast<int>(threadIdx.x); i < buckets; i += kChunkThreads) row[i] = counters[i];
}

// A CTA takes 32 buckets, a warp a slice of the chunks: partials become sums over the chunks before.
extern "C" __global__ void __launch_bounds__(cupy_gmm::kScanThreads)
    route_scan(const __grid_constant__ cupy_gmm::RouteParams p) {
    using namespace cupy_gmm;
    i32* slice_sums = route_shared();  // [32 slices][32 buckets]
    const int buckets = p.experts + 1;
    const int slice = static_cast<int>(threadIdx.x) / 32;
    const int bucket = static_cast<int>(blockIdx.x) * 32 + lane_id();
    const int share = (p.chunks + 31) / 32;
    const int first = slice * share;
    const int last = bucket >= buckets ? first : first + share < p.chunks ? first + share : p.chunks;
    i32* column = p.partials + bucket;
    i32 sum = 0;
#pragma unroll 4
    for (int chunk = first; chunk < last; ++chunk) sum += column[static_cast<i64>(chunk) * buckets];
    slice_sums[threadIdx.x] = sum;
    block_sync();
    i32 before = 0;
    for (int other = 0; other < slice; ++other) before += slice_sums[other * 32 + lane_id()];
    if (slice == 31 && bucket < p.experts) p.counts[bucket] = before + sum;
#pragma unroll 4
    for (int chunk = first; chunk < last; ++chunk) {
        i32* partial = &column[static_cast<i64>(chunk) * buckets];
        const i32 value = *partial;
        *partial = before;
        before += value;
    }
}

extern "C" __global__ void __launch_bounds__(cupy_gmm::kChunkThreads)
    route_place(const __grid_constant__ cupy_gmm::RouteParams p) {
    using namespace cupy_gmm;
    i32* next = route_shared();
    i32* warp_sums = next + p.experts + 1;
    const int buckets = p.experts + 1;
    const i64 first = static_cast<i64>(blockIdx.x) * p.chunk;
    const i64 end = first + p.chunk < p.assignments ? first + p.chunk : p.assignments;
    const i32* before = p.partials + static_cast<i64>(blockIdx.x) * buckets;
    i32 bucket[kItems];
    load_round(p, first, end, bucket);  // in flight during the scan
    // The dropped bucket's total is not needed: nothing comes after it.
    for (int i = static_cast<int>(threadIdx.x); i < buckets; i += kChunkThreads)
        next[i] = i < p.experts ? p.counts[i] : 0;
    block_sync();
    exclusive_scan<kChunkThreads>(next, buckets, warp_sums);
    if (blockIdx.x == 0) {
        for (int i = static_cast<int>(threadIdx.x); i < p.experts; i += kChunkThreads) p.offs[i] = next[i + 1];
    }
    block_sync();
    for (int i = static_cast<int>(threadIdx.x); i < buckets; i += kChunkThreads) next[i] += before[i];
    block_sync();
    for (i64 round = first; round < end; round += kChunkThreads * kItems) {
        if (round != first) load_round(p, round, end, bucket);
        place_round<kChunkThreads>(p, round, end, next, bucket);
    }
}
