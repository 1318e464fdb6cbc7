// The product of one output tile with cp.async, ldmatrix and mma.sync: acc += A tile * B tile over k [0, k_end).
// Called by grouped_mm.cuh and grouped_mm_wgrad.cuh; knows nothing of groups, schedules or outputs.
//
// Every element is summed in the same order, sixteen k at a time from 0, whatever the tile shape: a row's bits do
// not depend on the configuration nor on its neighbours. Elements past k_end are zeros on both sides.
#pragma once

#include "../config.cuh"
#include "../operand.cuh"
#include "../ptx/cp_async.cuh"
#include "../ptx/mma.cuh"

namespace cupy_gmm {

template <TileConfig kCfg>
struct Accumulators {
    float at[kCfg.slices_m()][kCfg.slices_n()][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kCfg.slices_m(); ++i) {
#pragma unroll
            for (int j = 0; j < kCfg.slices_n(); ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e) at[i][j][e] = 0.0f;
            }
        }
    }
};

// Where this warp works in the tile. 16-row slices are dealt to the warps in turn, so that a short tile still
// occupies all of them; columns are contiguous.
template <TileConfig kCfg>
struct WarpPlace {
    int warp_m;
    int column;

    __device__ static WarpPlace here() {
        const int warp = static_cast<int>(threadIdx.x) / 32;
        return {warp % kCfg.warps_m, warp / kCfg.warps_m * kCfg.slices_n() * 8};
    }
    __device__ __forceinline__ int row(int slice) const { return (slice * kCfg.warps_m + warp_m) * 16; }
    // How many slices of a warp are live in a tile of `rows` rows: the same for all warps, which meet at barriers.
    __device__ static __forceinline__ int slices(int rows) {
        return (rows + 16 * kCfg.warps_m - 1) / (16 * kCfg.warps_m);
    }
};

// kShortTiles: tiles with few rows are common enough to deserve loops of their own.
template <TileConfig kCfg, class T, class A, class B, bool kShortTiles>
struct Mainloop {
    static_assert(kCfg.legal(), "this TileConfig cannot be built: see TileConfig::legal");
    static constexpr int kAhead = kCfg.stages - 1;
    static constexpr int kSteps16 = kTileK / 16;
    static_assert(kSteps16 % 2 == 0, "the two fragment buffers take turns");

    const A& a;
    const B& b;
    char* shared;
    int k_end;
    WarpPlace<kCfg> place;

    // perf: one loop a number of live slices, so that a short tile costs what its rows cost and no loop branches
    // (bench/notes/0001-portable-forward.md).
    __device__ __forceinline__ void run(Accumulators<kCfg>& acc) const {
        if constexpr (kShortTiles) {
            dispatch<1>(acc, place.slices(a.mn_end));
        } else {
            loop<kCfg.slices_m()>(acc);
        }
    }

   private:
    struct Fragments {
        u32 a[kCfg.slices_m()][4];
        u32 b[kCfg.slices_n() / 2][4];
    };

    template <int kSlices>
    __device__ __forceinline__ void dispatch(Accumulators<kCfg>& acc, int slices) const {
        if constexpr (kSlices < kCfg.slices_m()) {
            if (slices > kSlices) {
                dispatch<kSlices + 1>(acc, slices);
                return;
            }
        }
        loop<kSlices>(acc);
    }

    template <int kSlices>
    __device__ __forceinline__ void loop(Accumulators<kCfg>& acc) const {
        const int steps = (k_end + kTileK - 1) / kTileK;
#pragma unroll 1
        for (int step = 0; step < kAhead; ++step) load(step, steps, step);
        cp_async_wait<kAhead - 1>();
        block_sync();
        // perf: the fragments of the next sixteen k are read while the tensor cores work on these; refilling A in place
        // instead of a second buffer saves registers and loses 8 % (bench/notes/0001-portable-forward.md).
        Fragments fragments[2];
        read<kSlices>(fragments[0], 0, 0);
        int slot = 0;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            // The slot that was read out one step ago; the barrier that ended that step has seen all warps past it.
            load(step + kAhead, steps, slot == 0 ? kAhead : slot - 1);
#pragma unroll
            for (int k16 = 0; k16 < kSteps16; ++k16) {
                if (k16 == kSteps16 - 1) {
                    cp_async_wait<kAhead - 1>();
                    block_sync();  // the next stage has landed for all
                    slot = slot + 1 == kCfg.stages ? 0 : slot + 1;
                }
                read<kSlices>(fragments[(k16 + 1) % 2], slot, (k16 + 1) % kSteps16);
                multiply<kSlices>(acc, fragments[k16 % 2]);
            }
        }
        cp_async_wait<0>();
        block_sync();  // the slots may be filled for the next tile
    }

    // A group is committed even when nothing is left to load: the wait counts groups.
    __device__ __forceinline__ void load(int step, int steps, int slot) const {
        if (step < steps) {
            char* stage = shared + slot * kCfg.stage_bytes();
            a.load(stage, step * kTileK, k_end);
            b.load(stage + A::kBytes, step * kTileK, k_end);
        }
        cp_async_commit();
    }

    template <int kSlices>
    __device__ __forceinline__ void read(Fragments& to, int slot, int k16) const {
        const u32 a_tile = shared_address(shared + slot * kCfg.stage_bytes());
        const u32 b_tile = a_tile + A::kBytes;
#pragma unroll
        for (int j = 0; j < kCfg.slices_n() / 2; ++j) B::load_b(to.b[j], b_tile, place.column + 16 * j, k16);
#pragma unroll
        for (int i = 0; i < kSlices; ++i) A::load_a(to.a[i], a_tile, place.row(i), k16);
    }

    template <int kSlices>
    __device__ __forceinline__ void multiply(Accumulators<kCfg>& acc, const Fragments& from) const {
#pragma unroll
        for (int i = 0; i < kSlices; ++i) {
#pragma unroll
            for (int j = 0; j < kCfg.slices_n(); ++j) {
                Mma<T>::run(acc.at[i][j], from.a[i], from.b[j / 2][j % 2 * 2], from.b[j / 2][j % 2 * 2 + 1]);
            }
        }
    }
};

}  // namespace cupy_gmm
