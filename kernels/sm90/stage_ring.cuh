// The load ring: of each stage the weights, then the tokens, one behind the other and round again, each as long as the
// tile needs it, so that small tiles have more stages in flight. Loading threads and consumer warpgroups each follow
// it on their own: all know the tiles.
#pragma once

#include "../pipeline.cuh"
#include "../ptx/types.cuh"
#include "config.cuh"

namespace cupy_gmm {

// Units of the ring that the two operands of a stage take.
struct StageExtent {
    u32 weights;
    u32 tokens;
};

// Where `units` go that follow what ends at `at`, in a ring of kUnits. An operand lies in one piece: where it would
// pass the end, it begins at the start.
template <int kUnits>
__device__ __forceinline__ u32 placed(u32 at, u32 units) {
    return at + units > kUnits ? 0 : at;
}

template <int kUnits>
struct StageRing {
    u32 nth = 0;      // stages before this one
    u32 at = 0;       // unit behind what was placed last
    u32 weights = 0;  // unit where the weights of this stage begin
    u32 before = 0;   // the barrier that says that the stage before was consumed; 0: there is none

    __device__ __forceinline__ int slot() const { return static_cast<int>(nth % kStageSlots); }
    __device__ __forceinline__ u32 phase() const { return nth / kStageSlots & 1; }

    // Of this stage: places the weights, then the tokens, and returns where those begin.
    __device__ __forceinline__ u32 place(const StageExtent& extent) {
        weights = placed<kUnits>(at, extent.weights);
        at = weights + extent.weights;
        const u32 tokens = placed<kUnits>(at, extent.tokens);
        at = tokens + extent.tokens;
        return tokens;
    }
    // consumed: the barrier of this stage, by address.
    __device__ __forceinline__ void advance(u32 consumed) {
        before = consumed;
        ++nth;
    }
};

// The view of the thread that loads one operand. What is to be waited for is found out beforehand: as soon as the place
// is free, it is filled; a stage as a whole, so that its tokens do not queue behind the weights of the next.
template <bool kWeights, int kUnits>
struct LoadRing {
    u32 nth = 0;     // stages before this one
    u32 at = 0;      // unit behind what was placed last
    u32 begin = 0;   // the same, counted on through all rounds
    u32 target = 0;  // unit where the operand goes
    u32 oldest = 0;  // stages before this one must have been consumed
    u32* starts;     // by slot: where the weights of a stage begin, counted on

    __device__ explicit LoadRing(u32* starts_) : starts(starts_) {}

    __device__ __forceinline__ int slot() const { return static_cast<int>(nth % kStageSlots); }

    // Finds the place of both operands of the next stage.
    __device__ __forceinline__ void plan(const StageExtent& extent) {
        const u32 weights = place(extent.weights);
        starts[slot()] = begin - extent.weights;
        const u32 tokens = place(extent.tokens);
        target = kWeights ? weights : tokens;
        while (begin > starts[oldest % kStageSlots] + kUnits || nth - oldest == kStageSlots) ++oldest;
    }

    // Waits until the planned place may be filled. consumed(slot) -> barrier.
    template <class Consumed>
    __device__ __forceinline__ void acquire(const Consumed& consumed) const {
        if (oldest > 0) wait_for(consumed((oldest - 1) % kStageSlots), (oldest - 1) / kStageSlots & 1);
    }

    __device__ __forceinline__ void filled() { ++nth; }

   private:
    __device__ __forceinline__ u32 place(u32 units) {
        const u32 found = placed<kUnits>(at, units);
        begin += units + (found == at ? 0 : kUnits - at);
        at = found + units;
        return found;
    }
};

}  // namespace cupy_gmm
