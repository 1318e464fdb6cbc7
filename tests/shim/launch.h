// The call by which Python starts a kernel.
#pragma once

#include <cstring>
#include <string>

#include "machine.h"

// By every thread kernel(params), which are copied from `bytes`. Returns what went wrong, or an empty text.
template <class Params, class Config, class Kernel>
const char* run_threads(const Config& config, const void* bytes, unsigned grid, int seed, const Kernel& kernel) {
    static std::string message;
    Params params;
    std::memcpy(static_cast<void*>(&params), bytes, sizeof(params));
    message = shim::launch([&] { kernel(params); }, grid, config.threads(), config.shared_bytes(), seed);
    return message.c_str();
}
