// Accumulators of one consumer warpgroup -> 64 rows of a group's (k, n) matrix. 16-bit results with 16-byte access go
// through stmatrix; float32, other strides, accumulation and pieces of a split group go through float32 staging.
#pragma once

#include "../operand.cuh"
#include "../params.cuh"
#include "../pieces.cuh"
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
struct WgradEpilogue {
    static constexpr int kPlainColumns = 32;    // columns staged as float32 at a time
    static constexpr int kPlainPitch = 32 + 8;  // floats: the rows that half a warp writes fall into different banks
    static_assert(64 * kPlainPitch * 4 <= 2 * kStagedBytes, "float32 staging takes both buffers");

    const Params& p;
    char* staged;  // two buffers of kStagedBytes
    int warpgroup;
    const GroupTile& tile;

    __device__ __forceinline__ void run(const float (&acc)[kCfg.n / 2]) const {
        const bool matrices = (p.flags & kVectorStore) != 0 && (p.flags & kAccumulate) == 0 && tile.pieces == 1;
        if (matrices && p.c_type == kOutBf16) {
            run_matrices<bf16>(acc);
        } else if (matrices && p.c_type == kOutFp16) {
            run_matrices<fp16>(acc);
        } else {
            run_plain(acc);
        }
    }

   private:
    __device__ __forceinline__ TilePlace place() const {
        TilePlace at = place_of(p, tile, kCfg.m, kCfg.n);
        at.row += warpgroup * 64;
        at.rows = at.rows - warpgroup * 64 < 64 ? at.rows - warpgroup * 64 : 64;
        return at;
    }
    __device__ __forceinline__ void meet() const { named_barrier_sync(1 + warpgroup, 128); }

    template <class Out>
    __device__ __forceinline__ void run_matrices(const float (&acc)[kCfg.n / 2]) const {
        const int lane = lane_id();
        const int thread = static_cast<int>(threadIdx.x) % 128;
        const int matrix = lane / 8;
        const TilePlace at = place();
        Out* const out = static_cast<Out*>(p.c) + tile.group * p.c_group + at.row * p.c_row + at.col;
        const int line = thread / 32 * 16 + matrix % 2 * 8 + lane % 8;
#pragma unroll
        for (int c = 0; c < kCfg.n / 64; ++c) {
            if (c * 64 >= at.cols) break;
            char* buffer = staged + c % 2 * kStagedBytes;
            // Matrices: rows 0-7 and 8-15 of this warp's 16, of columns 0-7, then of columns 8-15.
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const float* d = acc + (c * 64 + pair * 16) / 2;
                stmatrix_x4(shared_address(buffer) + swizzled(line, pair * 2 + matrix / 2),
                            Convert<Out>::pack(d[0], d[1]), Convert<Out>::pack(d[2], d[3]),
                            Convert<Out>::pack(d[4], d[5]), Convert<Out>::pack(d[6], d[7]));
            }
            meet();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = i * 16 + thread / 8;
                const int col = c * 64 + thread % 8 * 8;
                if (row < at.rows && col < at.cols) {
                    const Vec16 packed = *reinterpret_cast<const Vec16*>(buffer + swizzled(row, thread % 8));
                    store_packed(out + row * p.c_row + col, packed, at.cols - col);
                }
            }
        }
        meet();  // the buffers may be filled for the next tile
    }

    // body(row, column, Chunk) for every eight columns of this warpgroup's rows.
    template <class Body>
    __device__ __forceinline__ void for_each_plain_chunk(const float (&acc)[kCfg.n / 2], const Body& body) const {
        const int lane = lane_id();
        const int thread = static_cast<int>(threadIdx.x) % 128;
        const TilePlace at = place();
        float* floats = reinterpret_cast<float*>(staged);
#pragma unroll
        for (int c = 0; c < kCfg.n / kPlainColumns; ++c) {
            if (c * kPlainColumns >= at.cols) break;
#pragma unroll
            for (int j = 0; j < kPlainColumns / 8; ++j) {
                const float* d = acc + (c * kPlainColumns / 8 + j) * 4;
                float* to = floats + (thread / 32 * 16 + lane / 4) * kPlainPitch + j * 8 + lane % 4 * 2;
                *reinterpret_cast<Float2*>(to) = {d[0], d[1]};
                *reinterpret_cast<Float2*>(to + 8 * kPlainPitch) = {d[2], d[3]};
            }
            meet();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = i * 32 + thread / 4;
                const int col = c * kPlainColumns + thread % 4 * 8;
                const Float4* from = reinterpret_cast<const Float4*>(floats + row * kPlainPitch + thread % 4 * 8);
                if (row < at.rows && col < at.cols) body(row, col, Chunk{from[0], from[1]});
            }
            meet();
        }
    }

    __device__ __forceinline__ void run_plain(const float (&acc)[kCfg.n / 2]) const {
        const TilePlace at = place();
        if (tile.pieces == 1) {
            for_each_plain_chunk(acc, [&](int row, int col, const Chunk& chunk) { store_at(at, row, col, chunk); });
            return;
        }
        const i32 tiles_per_group = tiles_of_group(p, kCfg.m, kCfg.n);
        const i64 slot = static_cast<i64>(tile.first_slot) * tiles_per_group + tile.tile;
        const Pieces<kCfg.m, kCfg.n> pieces(p, slot, tiles_per_group);
        const int first_row = warpgroup * 64;
        for_each_plain_chunk(acc, [&](int row, int col, const Chunk& chunk) {
            pieces.save(tile.piece, first_row + row, col / 8, chunk);
        });
        if (!arrive_last(p.tickets + kTicketWords + slot * kCfg.consumers() + warpgroup)) return;
        const int thread = static_cast<int>(threadIdx.x) % 128;
        const int chunks = (at.cols + 7) / 8;
        for (int i = thread; i < at.rows * chunks; i += 128) {
            store_at(at, i / chunks, i % chunks * 8, pieces.sum(tile.pieces, first_row + i / chunks, i % chunks));
        }
    }

    __device__ __forceinline__ void store_at(const TilePlace& at, int row, int col, const Chunk& chunk) const {
        with_target(p, tile.group, at.row, at.col, [&](const auto& target) { store_chunk(target, row, col, chunk); });
    }

    // Counts this warpgroup's piece in; true where it is the last of the tile, which then sees the sums of all.
    __device__ __forceinline__ bool arrive_last(i32* arrivals) const {
        i32* const arrived = reinterpret_cast<i32*>(staged);
        fence_device();
        meet();
        if (static_cast<int>(threadIdx.x) % 128 == 0) *arrived = atomic_add(arrivals, 1);
        meet();
        const bool last = *arrived == tile.pieces - 1;
        meet();  // the word is read: staging may be overwritten
        fence_device();
        return last;
    }
};

}  // namespace cupy_gmm
