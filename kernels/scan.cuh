// Inclusive scans over the threads of a block. Used by schedule.cu.
#pragma once

#include "ptx/misc.cuh"
#include "ptx/types.cuh"

namespace cupy_gmm {

struct Sum {
    template <class T>
    __device__ static T combine(T a, T b) {
        return a + b;
    }
};
struct Max {
    template <class T>
    __device__ static T combine(T a, T b) {
        return a > b ? a : b;
    }
};

// Inclusive scan over the block in thread order, on top of `carry`; `carry` becomes the total.
template <class Op, int kWarps, class T>
__device__ T block_scan(T value, T& carry, T* warp_totals) {
    const int lane = lane_id();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    for (int distance = 1; distance < 32; distance *= 2) {
        const T other = warp_shfl_up(value, distance);
        if (lane >= distance) value = Op::combine(value, other);
    }
    if (lane == 31) warp_totals[warp] = value;
    block_sync();
    T before = carry;
    for (int w = 0; w < warp; ++w) before = Op::combine(before, warp_totals[w]);
    T total = carry;
    for (int w = 0; w < kWarps; ++w) total = Op::combine(total, warp_totals[w]);
    block_sync();
    carry = total;
    return Op::combine(before, value);
}

}  // namespace cupy_gmm
