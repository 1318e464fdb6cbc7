// Twin of kernels/ptx/memory.cuh: there is no cache to bypass; alignment is checked.
#pragma once

#include <cstring>

#include "../machine.h"
#include "types.cuh"

namespace cupy_gmm {

struct alignas(8) Float2 {
    float at[2];
};
struct alignas(16) Float4 {
    float at[4];
};

inline void check_aligned(const float* address) {
    if (reinterpret_cast<uintptr_t>(address) % 16 != 0) shim::fail("16 bytes at an unaligned address");
}

inline Float4 load_through(const float* address) {
    check_aligned(address);
    Float4 value;
    std::memcpy(&value, address, 16);
    return value;
}

inline void store_through(float* address, const Float4& value) {
    check_aligned(address);
    std::memcpy(address, &value, 16);
}

}  // namespace cupy_gmm
