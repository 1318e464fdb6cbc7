// Weight gradient with two tiles in flight, for both types.
#include "sm90/grouped_mm_wgrad_pingpong.cuh"

#include "launch.h"

using namespace cupy_gmm;

static constexpr PingpongConfig kConfig{
    .m = 128, .n = 192, .m_stages = 5, .n_stages = 4, .bundle = 4, .stored = 64, .front = 75};

extern "C" size_t params_bytes() { return sizeof(PingpongParams); }

extern "C" const char* run(const void* params, int half, int, unsigned grid, int seed) {
    return run_threads<PingpongParams>(kConfig, params, grid, seed, [=](const PingpongParams& h) {
        if (half) return grouped_mm_wgrad_pingpong_sm90<kConfig, fp16>(h);
        return grouped_mm_wgrad_pingpong_sm90<kConfig, bf16>(h);
    });
}
