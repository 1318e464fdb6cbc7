// Accumulators of one consumer warpgroup -> 64 columns of y, transposed on the way: wgmma holds weight columns as rows.
// Boxes are laid out by stmatrix.trans and stored by the copy engine, 64 tokens by 64 columns at a time; everything
// else goes through float32. Two kernels, since each takes half as long to compile as both in one.
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

enum class Store {
    kBoxes,     // y has the type of the operands, and the copy engine can write it
    kElements,  // any type, strides and alignment
};

// Of a warpgroup; for boxes it borrows more from the load ring.
constexpr int staging_buffers(Store store) { return store == Store::kBoxes ? 1 : 2; }

// Out: element of y, for boxes. kHalves: blocks of 64 columns that a warpgroup holds, one after the other; kTokens:
// most tokens of the tile.
template <class Out, Store kStore, int kHalves, int kTokens>
struct HopperEpilogue {
    static constexpr int kPlainTokens = 32;     // tokens staged as float32 at a time
    static constexpr int kPlainPitch = 64 + 4;  // floats: the four rows that a quad writes fall into different banks
    static_assert(kPlainTokens * kPlainPitch * 4 <= staging_buffers(Store::kElements) * kStagedBytes);

    const TensorMap* map;  // of y, ragged
    const Params& p;
    char* staged;  // its staging buffers
    char* held;    // kHalves more, for boxes
    int warpgroup;
    const RowTile& tile;

    __device__ __forceinline__ void run(const float* acc) const {
        if constexpr (kStore == Store::kBoxes) {
            run_matrices(acc);
        } else {
            run_plain(acc);
        }
    }

   private:
    __device__ __forceinline__ int first_column(int half) const { return tile.col + (warpgroup * kHalves + half) * 64; }
    __device__ __forceinline__ void meet() const { named_barrier_sync(1 + warpgroup, 128); }

    static constexpr int kBuffers = staging_buffers(Store::kBoxes) + kHalves;
    __device__ __forceinline__ u32 buffer(int nth) const {
        const int at = nth % kBuffers;
        return shared_address(at < kHalves ? held : staged) + (at < kHalves ? at : at - kHalves) * kStagedBytes;
    }

    // One thread stores; the others go on with the other buffers meanwhile.
    __device__ __forceinline__ void run_matrices(const float* acc) const {
        const u32 thread = forgotten(threadIdx.x) % 128;
        const u32 lane = thread % 32;
        const u32 matrix = lane / 8;
        meet();  // the buffers may be filled: this thread has waited for the stores before, see HopperMainloop
#pragma unroll
        for (int c = 0; c < (kTokens + kStagedLines - 1) / kStagedLines; ++c) {
            if (c * kStagedLines >= tile.rows) break;
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                const int nth = c * kHalves + half;
                // Matrices: columns 0-7 and 8-15 of this warp's 16, of tokens 0-7, then of tokens 8-15.
                const u32 column_chunk = thread / 32 * 2 + matrix % 2;
#pragma unroll
                for (int group = 0; group < kStagedLines / 16; ++group) {
                    if (c * kStagedLines + group * 16 < kTokens) {
                        const float* d = acc + (half * kTokens + c * kStagedLines + group * 16) / 2;
                        const u32 token = group * 16 + matrix / 2 * 8 + lane % 8;
                        stmatrix_x4_trans(buffer(nth) + swizzled(token, column_chunk), Convert<Out>::pack(d[0], d[1]),
                                          Convert<Out>::pack(d[2], d[3]), Convert<Out>::pack(d[4], d[5]),
                                          Convert<Out>::pack(d[6], d[7]));
                    }
                }
                fence_proxy_async();
                // After the meeting the next buffer may be filled.
                if (thread == 0 && nth + 1 >= kBuffers) tma_store_wait_read<kBuffers - 2>();
                meet();
                if (thread == 0 && first_column(half) < p.n) {
                    const int before_end = c * kStagedLines - tile.rows;
                    tma_store_4d(map, buffer(nth), first_column(half), kRagged + before_end, tile.first_row + tile.rows,
                                 kRagged);
                }
                if (thread == 0) tma_store_commit();  // also without a store: groups are counted
            }
        }
    }

    // The code that stores stands there once: unrolled it would take most of the compile.
    __device__ __forceinline__ void run_plain(const float* acc) const {
        constexpr int kSteps = (kTokens + kPlainTokens - 1) / kPlainTokens * kHalves;
        const int thread = static_cast<int>(forgotten(threadIdx.x) % 128);
        float* floats = reinterpret_cast<float*>(staged);
#pragma unroll 1
        for (int step = 0; step < kSteps && step / kHalves * kPlainTokens < tile.rows; ++step) {
#pragma unroll
            for (int each = 0; each < kSteps; ++each) {
                if (each == step) {
                    stage_plain(acc + each % kHalves * (kTokens / 2) + each / kHalves * (kPlainTokens / 2),
                                kTokens - each / kHalves * kPlainTokens, floats, thread);
                }
            }
            meet();
#pragma unroll 1
            for (int i = thread; i < kPlainTokens * 8; i += 128) {
                const int row = step / kHalves * kPlainTokens + i / 8;
                const Float4* from = reinterpret_cast<const Float4*>(floats + i / 8 * kPlainPitch + i % 8 * 8);
                if (row < tile.rows) {
                    with_target(p, 0, tile.first_row, first_column(step % kHalves), [&](const auto& target) {
                        if (i % 8 * 8 < target.cols) store_chunk(target, row, i % 8 * 8, {from[0], from[1]});
                    });
                }
            }
            meet();
        }
    }

    // kPlainTokens tokens of 64 columns as float32, of which `tokens` exist in the accumulators.
    __device__ __forceinline__ static void stage_plain(const float* acc, int tokens, float* floats, int thread) {
        const int lane = thread % 32;
        float* at = floats + lane % 4 * 2 * kPlainPitch + thread / 32 * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < kPlainTokens / 8; ++j) {
            if (j * 8 < tokens) {
                at[(j * 8) * kPlainPitch] = acc[j * 4];
                at[(j * 8 + 1) * kPlainPitch] = acc[j * 4 + 1];
                at[(j * 8) * kPlainPitch + 8] = acc[j * 4 + 2];
                at[(j * 8 + 1) * kPlainPitch + 8] = acc[j * 4 + 3];
            }
        }
    }
};

}  // namespace cupy_gmm
