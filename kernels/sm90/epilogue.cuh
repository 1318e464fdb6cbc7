// Accumulators of one consumer warpgroup -> 64 columns of y, transposed on the way: wgmma holds weight columns as rows.
// Where the copy engine can write y it stores what stmatrix.trans has laid out, 64 tokens by 64 columns at a time;
// everything else goes through float32.
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
#include "../tiles.cuh"
#include "config.cuh"

namespace cupy_gmm {

// kHalves: blocks of 64 columns that a warpgroup holds, one after the other; kTokens: most tokens of the tile.
template <int kHalves, int kTokens>
struct HopperEpilogue {
    static constexpr int kPlainTokens = 32;     // tokens staged as float32 at a time
    static constexpr int kPlainPitch = 64 + 4;  // floats: the four rows that a quad writes fall into different banks
    static_assert(kPlainTokens * kPlainPitch * 4 <= 2 * kStagedBytes, "float32 staging takes both buffers");

    const TensorMap* map;  // of y, ragged
    const Params& p;
    char* staged;  // two buffers of kStagedBytes
    int warpgroup;
    const RowTile& tile;

    __device__ __forceinline__ void run(const float* acc) const {
        if ((p.flags & kBoxStore) != 0 && p.c_type == kOutBf16) {
            run_matrices<bf16>(acc);
        } else if ((p.flags & kBoxStore) != 0 && p.c_type == kOutFp16) {
            run_matrices<fp16>(acc);
        } else {
            run_plain(acc);
        }
    }

   private:
    __device__ __forceinline__ int first_column(int half) const { return tile.col + (warpgroup * kHalves + half) * 64; }
    __device__ __forceinline__ void meet() const { named_barrier_sync(1 + warpgroup, 128); }

    // One thread stores; the others go on with the other buffer meanwhile.
    template <class Out>
    __device__ __forceinline__ void run_matrices(const float* acc) const {
        const int thread = forgotten(static_cast<int>(threadIdx.x)) % 128;
        const int lane = thread % 32;
        const int matrix = lane / 8;
        if (thread == 0) tma_store_wait_read<0>();
        meet();  // the buffers may be filled
#pragma unroll
        for (int c = 0; c < (kTokens + kStagedLines - 1) / kStagedLines; ++c) {
            if (c * kStagedLines >= tile.rows) break;
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                const u32 buffer = shared_address(staged) + (c * kHalves + half) % 2 * kStagedBytes;
                // Matrices: columns 0-7 and 8-15 of this warp's 16, of tokens 0-7, then of tokens 8-15.
                const int column_chunk = thread / 32 * 2 + matrix % 2;
#pragma unroll
                for (int group = 0; group < kStagedLines / 16; ++group) {
                    if (c * kStagedLines + group * 16 < kTokens) {
                        const float* d = acc + (half * kTokens + c * kStagedLines + group * 16) / 2;
                        const int token = group * 16 + matrix / 2 * 8 + lane % 8;
                        stmatrix_x4_trans(buffer + swizzled(token, column_chunk), Convert<Out>::pack(d[0], d[1]),
                                          Convert<Out>::pack(d[2], d[3]), Convert<Out>::pack(d[4], d[5]),
                                          Convert<Out>::pack(d[6], d[7]));
                    }
                }
                fence_proxy_async();
                if (thread == 0) tma_store_wait_read<0>();  // the other buffer may be filled after the meeting
                meet();
                if (thread == 0 && first_column(half) < p.n) {
                    const int before_end = c * kStagedLines - tile.rows;
                    tma_store_4d(map, buffer, first_column(half), kRagged + before_end, tile.first_row + tile.rows,
                                 kRagged);
                    tma_store_commit();
                }
            }
        }
    }

    __device__ __forceinline__ void run_plain(const float* acc) const {
        const int thread = forgotten(static_cast<int>(threadIdx.x)) % 128;
        const int lane = thread % 32;
        float* floats = reinterpret_cast<float*>(staged);
#pragma unroll
        for (int c = 0; c < (kTokens + kPlainTokens - 1) / kPlainTokens; ++c) {
            if (c * kPlainTokens >= tile.rows) break;
            const int column = thread / 32 * 16 + lane / 4;
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
#pragma unroll
                for (int j = 0; j < kPlainTokens / 8; ++j) {
                    if (c * kPlainTokens + j * 8 < kTokens) {
                        const float* d = acc + half * kTokens / 2 + (c * kPlainTokens / 8 + j) * 4;
                        float* at = floats + (j * 8 + lane % 4 * 2) * kPlainPitch + column;
                        at[0] = d[0];
                        at[kPlainPitch] = d[1];
                        at[8] = d[2];
                        at[kPlainPitch + 8] = d[3];
                    }
                }
                meet();
                for (int i = thread; i < kPlainTokens * 8; i += 128) {
                    const int row = c * kPlainTokens + i / 8;
                    const Float4* from = reinterpret_cast<const Float4*>(floats + i / 8 * kPlainPitch + i % 8 * 8);
                    if (row < tile.rows) {
                        with_target(p, 0, tile.first_row, first_column(half), [&](const auto& target) {
                            if (i % 8 * 8 < target.cols) store_chunk(target, row, i % 8 * 8, {from[0], from[1]});
                        });
                    }
                }
                meet();
            }
        }
    }
};

}  // namespace cupy_gmm
