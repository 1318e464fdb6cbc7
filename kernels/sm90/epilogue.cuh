// Accumulators of one consumer warpgroup -> 64 columns of y, transposed on the way: wgmma holds weight columns as rows.
// 16-bit outputs with 16-byte access go through stmatrix.trans; everything else through float32.
#pragma once

#include "../operand.cuh"
#include "../params.cuh"
#include "../ptx/convert.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/misc.cuh"
#include "../ptx/stmatrix.cuh"
#include "../ptx/warpgroup.cuh"
#include "../stores.cuh"
#include "../tiles.cuh"
#include "config.cuh"

namespace cupy_gmm {

template <HopperConfig kCfg>
struct HopperEpilogue {
    static constexpr int kChunks = kCfg.n / kStagedLines;
    static constexpr int kPlainTokens = 32;     // tokens staged as float32 at a time
    static constexpr int kPlainPitch = 64 + 4;  // floats: the four rows that a quad writes fall into different banks
    static_assert(kPlainTokens * kPlainPitch * 4 <= 2 * kStagedBytes, "float32 staging takes both buffers");

    const Params& p;
    char* staged;  // two buffers of kStagedBytes
    int warpgroup;
    const RowTile& tile;

    __device__ __forceinline__ void run(const float (&acc)[kCfg.n / 2]) const {
        if ((p.flags & kVectorStore) != 0 && p.c_type == kOutBf16) {
            run_matrices<bf16>(acc);
        } else if ((p.flags & kVectorStore) != 0 && p.c_type == kOutFp16) {
            run_matrices<fp16>(acc);
        } else {
            run_plain(acc);
        }
    }

   private:
    __device__ __forceinline__ int first_column() const { return tile.col + warpgroup * 64; }
    __device__ __forceinline__ void meet() const { named_barrier_sync(1 + warpgroup, 128); }

    template <class Out>
    __device__ __forceinline__ void run_matrices(const float (&acc)[kCfg.n / 2]) const {
        const int lane = lane_id();
        const int thread = static_cast<int>(threadIdx.x) % 128;
        const int matrix = lane / 8;
        Out* const out = static_cast<Out*>(p.c) + tile.first_row * p.c_row + first_column();
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            if (c * kStagedLines >= tile.rows) break;
            char* buffer = staged + c % 2 * kStagedBytes;
            // Matrices: columns 0-7 and 8-15 of this warp's 16, of tokens 0-7, then of tokens 8-15.
            const int column_chunk = thread / 32 * 2 + matrix % 2;
#pragma unroll
            for (int group = 0; group < kStagedLines / 16; ++group) {
                const float* d = acc + (c * kStagedLines + group * 16) / 2;
                const int token = group * 16 + matrix / 2 * 8 + lane % 8;
                stmatrix_x4_trans(shared_address(buffer) + swizzled(token, column_chunk),
                                  Convert<Out>::pack(d[0], d[1]), Convert<Out>::pack(d[2], d[3]),
                                  Convert<Out>::pack(d[4], d[5]), Convert<Out>::pack(d[6], d[7]));
            }
            meet();
#pragma unroll
            for (int i = 0; i < kStagedLines / 16; ++i) {
                const int token = i * 16 + thread / 8;
                const int chunk = thread % 8;
                const int row = c * kStagedLines + token;
                const int columns = p.n - first_column() - chunk * 8;
                if (row < tile.rows && columns > 0) {
                    const Vec16 packed = *reinterpret_cast<const Vec16*>(buffer + swizzled(token, chunk));
                    store_packed(out + row * p.c_row + chunk * 8, packed, columns);
                }
            }
        }
        meet();  // the buffers may be filled for the next tile
    }

    __device__ __forceinline__ void run_plain(const float (&acc)[kCfg.n / 2]) const {
        const int lane = lane_id();
        const int thread = static_cast<int>(threadIdx.x) % 128;
        float* floats = reinterpret_cast<float*>(staged);
#pragma unroll
        for (int c = 0; c < kCfg.n / kPlainTokens; ++c) {
            if (c * kPlainTokens >= tile.rows) break;
            const int column = thread / 32 * 16 + lane / 4;
#pragma unroll
            for (int j = 0; j < kPlainTokens / 8; ++j) {
                const float* d = acc + (c * kPlainTokens / 8 + j) * 4;
                float* at = floats + (j * 8 + lane % 4 * 2) * kPlainPitch + column;
                at[0] = d[0];
                at[kPlainPitch] = d[1];
                at[8] = d[2];
                at[kPlainPitch + 8] = d[3];
            }
            meet();
            for (int i = thread; i < kPlainTokens * 8; i += 128) {
                const int row = c * kPlainTokens + i / 8;
                const Float4* from = reinterpret_cast<const Float4*>(floats + i / 8 * kPlainPitch + i % 8 * 8);
                if (row < tile.rows) {
                    with_target(p, 0, tile.first_row, first_column(), [&](const auto& target) {
                        if (i % 8 * 8 < target.cols) store_chunk(target, row, i % 8 * 8, {from[0], from[1]});
                    });
                }
            }
            meet();
        }
    }
};

}  // namespace cupy_gmm
