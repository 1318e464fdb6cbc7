// Accumulators of one warpgroup -> its tile of a group's weight gradient. 16-bit results with 16-byte access go through
// shared memory, from where the copy engine takes 32 rows at a time; float32 and everything else goes straight from
// registers.
#pragma once

#include "../operand.cuh"
#include "../params.cuh"
#include "../ptx/convert.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/misc.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/warpgroup.cuh"
#include "../stores.cuh"
#include "config.cuh"
#include "pingpong_roles.cuh"
#include "ragged.cuh"

namespace cupy_gmm {

template <PingpongConfig kCfg>
struct PingpongEpilogue {
    static constexpr int kHalf = kCfg.n / 2;
    static constexpr int kAccumulators = kCfg.m / 64 * kHalf;
    using Accumulators = float (&)[kAccumulators];

    const PingpongParams& h;
    char* staged;  // of the warpgroup
    i32& arrived;  // the same
    i32 group;
    i32 row;  // of c, where the tile begins
    i32 col;
    i32 cols;  // that are computed
    i32 piece;
    i32 pieces;
    i32 slot;

    __device__ __forceinline__ void run(Accumulators acc) const {
        if (pieces > 1 && !add_pieces(acc)) return;
        const Params& p = h.p;
        const bool accumulate = (p.flags & kAccumulate) != 0;
        if ((p.flags & kBoxStore) != 0) {
            if (p.c_type == kOutBf16) {
                if (accumulate) add_old<bf16>(acc);
                store_boxes<bf16>(acc);
            } else {
                if (accumulate) add_old<fp16>(acc);
                store_boxes<fp16>(acc);
            }
        } else if ((p.flags & kVectorStore) != 0 && p.c_type == kOutFp32 && p.n % 8 == 0) {
            store_pairs(acc, accumulate);
        } else {
            store_elements(acc);
        }
    }

    // Before the warpgroup ends: the copy engine has taken everything.
    __device__ __forceinline__ static void finish() {
        if (issues()) tma_store_wait<0>();
    }

   private:
    __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x % 128); }
    // Of this thread's first accumulator, counted from the tile's first.
    __device__ __forceinline__ static int own_row() { return thread() / 32 * 16 + lane_id() / 4; }
    __device__ __forceinline__ static int own_col() { return lane_id() % 4 * 2; }
    __device__ __forceinline__ int rows_left() const { return h.p.k - row - own_row(); }
    __device__ __forceinline__ int cols_left() const { return h.p.n - col < cols ? h.p.n - col : cols; }
    template <class Out>
    __device__ __forceinline__ Out* first_of_row() const {
        const Params& p = h.p;
        return static_cast<Out*>(p.c) + group * p.c_group + (row + own_row()) * p.c_row + col * p.c_col;
    }

    // Leaves this thread's accumulators in the scratch; true for the last piece of its tile, which then has the sums
    // over all of them, in their order.
    __device__ __forceinline__ bool add_pieces(Accumulators acc) const {
        constexpr i64 kTileFloats = kCfg.m * kCfg.n;
        const i64 next_piece = kTileFloats * ((h.p.k + kCfg.m - 1) / kCfg.m) * ((h.p.n + kCfg.n - 1) / kCfg.n);
        float* const first = h.p.partials + slot * kTileFloats + thread() * 4;
#pragma unroll
        for (int i = 0; i < kAccumulators / 4; ++i) {
            store_through(first + piece * next_piece + i * 512,
                          {acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]});
        }
        fence_device();
        meet();
        if (thread() == 0) arrived = atomic_add(h.p.tickets + kTicketWords + slot, 1);
        meet();
        if (arrived != pieces - 1) return false;
        if (thread() == 0) h.p.tickets[kTicketWords + slot] = 0;  // as the launch found it
        fence_device();
#pragma unroll
        for (int i = 0; i < kAccumulators; ++i) acc[i] = 0.0f;
        for (int from = 0; from < pieces; ++from) {
#pragma unroll
            for (int i = 0; i < kAccumulators / 4; ++i) {
                const Float4 part = load_through(first + from * next_piece + i * 512);
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[4 * i + e] += part.at[e];
            }
        }
        return true;
    }

    // body(row of c at this thread's first column, its first accumulator) for each of this thread's rows of c.
    template <class Out, class Body>
    __device__ __forceinline__ void for_each_row(Accumulators acc, const Body& body) const {
        Out* const first = first_of_row<Out>() + own_col();
#pragma unroll
        for (int i = 0; i < kCfg.m / 32; ++i) {
            const int down = i / 2 * 64 + i % 2 * 8;
            body(first + down * h.p.c_row, acc + i / 2 * kHalf + i % 2 * 2, down < rows_left());
        }
    }

    // What stands in c on top of the accumulators; 16-bit results, whole chunks of eight columns.
    template <class Out>
    __device__ __forceinline__ void add_old(Accumulators acc) const {
        for_each_row<Out>(acc, [&](const Out* from, float* d, bool inside) {
#pragma unroll
            for (int right = 0; right < kCfg.n; right += 8) {
                if (inside && right < cols_left()) {
                    const u32 old = *reinterpret_cast<const u32*>(from + right);
                    d[right / 2] += widen(Out{static_cast<u16>(old)});
                    d[right / 2 + 1] += widen(Out{static_cast<u16>(old >> 16)});
                }
            }
        });
    }

    __device__ __forceinline__ static bool issues() { return thread() == 0; }
    __device__ __forceinline__ static void meet() { named_barrier_sync(static_cast<int>(threadIdx.x / 128), 128); }

    // perf: eight of every sixteen rows at a time, what the warps hold next to each other, and all columns: one buffer
    // is filled while the other is read, and whole rows of the tile are written at once
    // (bench/notes/0007-hopper-wgrad-pingpong.md).
    template <class Out>
    __device__ __forceinline__ void store_boxes(Accumulators acc) const {
        constexpr int kMatrixBytes = 8 * kLineBytes;   // eight rows of 64 columns
        constexpr int kBlockBytes = 4 * kMatrixBytes;  // of the four warps
        const bool whole = (h.p.flags & kWholeColumnBlocks) != 0;
        const TensorMap* const map = &h.c[cols < kCfg.n ? 1 : 0];
        const int lane = lane_id();
        const u32 own_line = shared_address(staged) + thread() / 32 * kMatrixBytes + lane % 8 * kLineBytes;
#pragma unroll
        for (int piece = 0; piece < kCfg.m / 32; ++piece) {
            const int half = piece / 2;
            const int eight = piece % 2;
            const u32 buffer = piece % 2 * (kCfg.staged_bytes() / 2);
            if (issues()) tma_store_wait_read<1>();  // the box before the last one has left
            meet();
#pragma unroll
            for (int right = 0; right < kCfg.n; right += 32) {
                const float* d = acc + half * kHalf + right / 2 + eight * 2;
                const u32 chunk = (right % 64 / 8 + lane / 8) ^ (lane % 8);
                stmatrix_x4(own_line + buffer + right / 64 * kBlockBytes + chunk * kChunkBytes,
                            Convert<Out>::pack(d[0], d[1]), Convert<Out>::pack(d[4], d[5]),
                            Convert<Out>::pack(d[8], d[9]), Convert<Out>::pack(d[12], d[13]));
            }
            fence_proxy_async();
            meet();
            if (issues()) {
                const u32 box = shared_address(staged) + buffer;
                const i32 down = row + half * 64;
                if (whole) {
                    tma_store_5d(map, box, 0, eight * 8, down / 16, col / 64, group);
                } else {
#pragma unroll 1
                    for (int at = 0; at < cols / 64 * 4; ++at) {
                        tma_store_4d(map, box + at * kMatrixBytes, col + at / 4 * 64, down + at % 4 * 16 + eight * 8, 0,
                                     group);
                    }
                }
                tma_store_commit();
            }
        }
    }

    // float32 results, whole pairs of columns.
    __device__ __forceinline__ void store_pairs(Accumulators acc, bool accumulate) const {
        for_each_row<float>(acc, [&](float* to, const float* d, bool inside) {
#pragma unroll
            for (int right = 0; right < kCfg.n; right += 8) {
                if (inside && right < cols_left()) {
                    Float2 pair{d[right / 2], d[right / 2 + 1]};
                    if (accumulate) {
                        const Float2 old = *reinterpret_cast<const Float2*>(to + right);
                        pair.at[0] += old.at[0];
                        pair.at[1] += old.at[1];
                    }
                    *reinterpret_cast<Float2*>(to + right) = pair;
                }
            }
        });
    }

    // Any type, strides and alignment. One body for all columns: the accumulators move down eight columns a round.
    __device__ __forceinline__ void store_elements(Accumulators acc) const {
#pragma unroll 1
        for (int first = 0; first < kCfg.n && first < cols_left(); first += 8) {
            with_target(h.p, group, row + own_row(), col + first + own_col(), [&](const auto& target) {
#pragma unroll
                for (int i = 0; i < kCfg.m / 64 * 4; ++i) {
                    const int down = i / 4 * 64 + i / 2 % 2 * 8;
                    if (down < rows_left() && i % 2 < target.cols) {
                        store_at(target, down, i % 2, acc[i / 4 * kHalf + i % 4]);
                    }
                }
            });
#pragma unroll
            for (int i = 0; i < kAccumulators; ++i) {
                if (i % kHalf + 4 < kHalf) acc[i] = acc[i + 4];
            }
        }
    }

    template <class Out>
    __device__ __forceinline__ static void store_at(const Target<Out>& target, int down, int right, float value) {
        Out* const to = target.base + down * target.row_stride + right * target.col_stride;
        store_element(to, target.accumulate ? widen(*to) + value : value);
    }
};

}  // namespace cupy_gmm
