// Weight gradient for both types; its operands have one layout.
#include "sm90/grouped_mm_wgrad.cuh"

#include "launch.h"

using namespace cupy_gmm;

static constexpr HopperConfig kConfig{.m = 128, .n = 256, .stages = 4};

extern "C" size_t params_bytes() { return sizeof(HopperWgradParams); }

extern "C" const char* run(const void* params, int half, int, unsigned grid, int seed) {
    return run_threads<HopperWgradParams>(kConfig, params, grid, seed, [=](const HopperWgradParams& h) {
        if (half) return grouped_mm_wgrad_sm90<kConfig, fp16>(h);
        return grouped_mm_wgrad_sm90<kConfig, bf16>(h);
    });
}
