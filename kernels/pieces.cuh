// Partial sums of a split group's tiles in scratch memory: one tile of float32 a piece. Used by both weight gradients.
#pragma once

#include "params.cuh"
#include "ptx/memory.cuh"
#include "stores.cuh"

namespace cupy_gmm {

template <int kRows, int kColumns>
struct Pieces {
    static constexpr i64 kTileFloats = static_cast<i64>(kRows) * kColumns;

    float* first;
    i64 step;  // floats from one piece of a tile to the next

    // slot: the tile's first piece, counted in tiles.
    __device__ Pieces(const Params& p, i64 slot, i32 tiles_per_group)
        : first(p.partials + slot * kTileFloats), step(tiles_per_group * kTileFloats) {}

    __device__ __forceinline__ float* at(int piece, int row, int chunk) const {
        return first + piece * step + row * kColumns + chunk * 8;
    }
    __device__ __forceinline__ void save(int piece, int row, int chunk, const Chunk& value) const {
        store_through(at(piece, row, chunk), value.half[0]);
        store_through(at(piece, row, chunk) + 4, value.half[1]);
    }
    // In the order of the pieces, whichever arrived first.
    __device__ __forceinline__ Chunk sum(int pieces, int row, int chunk) const {
        Chunk total{};
        for (int piece = 0; piece < pieces; ++piece) {
            total.add({load_through(at(piece, row, chunk)), load_through(at(piece, row, chunk) + 4)});
        }
        return total;
    }
};

}  // namespace cupy_gmm
