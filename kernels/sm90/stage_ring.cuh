// The load ring: stages of any number of 8 KB blocks, one behind the other and round again, so that small tiles have
// more stages in flight. Loading threads and consumer warpgroups each follow it on their own: both know the tiles.
#pragma once

#include "../pipeline.cuh"
#include "../ptx/types.cuh"
#include "config.cuh"

namespace cupy_gmm {

// kBlocks: of the ring. A stage lies in one piece: where it would pass the end, it begins at the start.
template <int kBlocks>
struct StageRing {
    u32 nth = 0;  // stages before this one
    u32 at = 0;   // block where it begins

    __device__ __forceinline__ int slot() const { return static_cast<int>(nth % kStageSlots); }
    __device__ __forceinline__ u32 phase() const { return nth / kStageSlots & 1; }
    __device__ __forceinline__ u32 offset() const { return at * kBlockBytes; }

    __device__ __forceinline__ void fit(u32 blocks) {
        if (at + blocks > kBlocks) at = 0;
    }
    __device__ __forceinline__ void advance(u32 blocks) {
        at += blocks;
        ++nth;
    }
};

// A loading thread's view. What is to be waited for is found out beforehand: as soon as a stage is free, it is filled.
template <int kBlocks>
struct LoadRing : StageRing<kBlocks> {
    u32 oldest = 0;     // stages before this one must be free
    u32 begin = 0;      // of the stage, counted on through all rounds
    u32 end = kBlocks;  // where a stage must end so as not to touch the oldest
    u32* starts;        // by slot: where a stage begins, counted on

    __device__ explicit LoadRing(u32* starts_) : starts(starts_) {}

    // Finds the place of the next stage, of so many blocks.
    __device__ __forceinline__ void plan(u32 blocks) {
        begin += this->at + blocks > kBlocks ? kBlocks - this->at : 0;
        this->fit(blocks);
        starts[this->slot()] = begin;
        while (begin + blocks > end || this->nth - oldest == kStageSlots) {
            ++oldest;
            end = starts[oldest % kStageSlots] + kBlocks;
        }
    }

    // Waits until the planned stage may be filled. consumed(slot) -> barrier.
    template <class Consumed>
    __device__ __forceinline__ void acquire(const Consumed& consumed) const {
        if (oldest > 0) wait_for(consumed((oldest - 1) % kStageSlots), (oldest - 1) / kStageSlots & 1);
    }

    __device__ __forceinline__ void filled(u32 blocks) {
        begin += blocks;
        this->advance(blocks);
    }
};

}  // namespace cupy_gmm
