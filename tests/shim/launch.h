// Hopper's shipped tuning point, and the call by which Python starts a kernel.
#pragma once

#include <cstring>
#include <string>

#include "machine.h"
#include "sm90/config.cuh"

inline constexpr cupy_gmm::HopperConfig kConfig{.m = 128, .n = 256, .stages = 4};

// By every thread kernel(params), which are copied from `bytes`. Returns what went wrong, or an empty text.
template <class Params, class Kernel>
const char* run_threads(const void* bytes, unsigned grid, int seed, const Kernel& kernel) {
    static std::string message;
    Params params;
    std::memcpy(static_cast<void*>(&params), bytes, sizeof(params));
    message = shim::launch([&] { kernel(params); }, grid, kConfig.threads(), kConfig.shared_bytes(), seed);
    return message.c_str();
}
