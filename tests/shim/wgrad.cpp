// Weight gradient with two tiles in flight, for both types.
#include "sm90/grouped_mm_wgrad_pingpong.cuh"

#include "launch.h"
#include "wgrad_config.h"  // kConfig, as the library has it

using namespace cupy_gmm;

extern "C" size_t params_bytes() { return sizeof(PingpongParams); }

extern "C" const char* run(const void* params, int half, int, unsigned grid, int seed) {
    return run_threads<PingpongParams>(kConfig, params, grid, seed, [=](const PingpongParams& h) {
        if (half) return grouped_mm_wgrad_pingpong_sm90<kConfig, fp16>(h);
        return grouped_mm_wgrad_pingpong_sm90<kConfig, bf16>(h);
    });
}
