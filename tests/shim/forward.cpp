// Forward and input gradient for every type and layout of the weights.
#include "sm90/grouped_mm.cuh"

#include "launch.h"
#include "forward_config.h"  // kConfig, as the library has it

using namespace cupy_gmm;

extern "C" size_t params_bytes() { return sizeof(HopperParams); }

template <Store kStore>
static void product(const HopperParams& h, int half, int k_major) {
    if (half && k_major) return grouped_mm_sm90<kConfig, fp16, Layout::kKMajor, kStore>(h);
    if (half) return grouped_mm_sm90<kConfig, fp16, Layout::kMnMajor, kStore>(h);
    if (k_major) return grouped_mm_sm90<kConfig, bf16, Layout::kKMajor, kStore>(h);
    return grouped_mm_sm90<kConfig, bf16, Layout::kMnMajor, kStore>(h);
}

// The map of y is zeros where the copy engine cannot write it.
extern "C" const char* run(const void* params, int half, int k_major, unsigned grid, int seed) {
    return run_threads<HopperParams>(kConfig, params, grid, seed, [=](const HopperParams& h) {
        const bool boxes = h.y.words[0] != 0;
        boxes ? product<Store::kBoxes>(h, half, k_major) : product<Store::kElements>(h, half, k_major);
    });
}
