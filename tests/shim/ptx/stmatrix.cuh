// Twin of kernels/ptx/stmatrix.cuh: lane 8 i + j names the place of line j of matrix i.
#pragma once

#include <cstring>

#include "misc.cuh"

namespace cupy_gmm {

inline void collect_addresses(Collective kind, u32 address, u32 (&all)[32]) {
    if (address % 16 != 0) shim::fail("stmatrix at an unaligned address");
    exchange<u32>(kind, address, all);
}

inline void stmatrix_x4(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    const u32 fragments[4] = {m0, m1, m2, m3};
    u32 line[32];
    collect_addresses(kStore, address, line);
    const int lane = lane_id();
    for (int matrix = 0; matrix < 4; ++matrix) {
        const u32 target = line[matrix * 8 + lane / 4] + 4 * (lane % 4);
        std::memcpy(shim::pointer_of(target, 4), &fragments[matrix], 4);
    }
}

inline void stmatrix_x4_trans(u32 address, u32 m0, u32 m1, u32 m2, u32 m3) {
    const u32 fragments[4] = {m0, m1, m2, m3};
    u32 line[32];
    collect_addresses(kStoreTransposed, address, line);
    const int lane = lane_id();
    for (int matrix = 0; matrix < 4; ++matrix) {
        for (int half = 0; half < 2; ++half) {
            const u16 value = static_cast<u16>(fragments[matrix] >> (16 * half));
            const u32 target = line[matrix * 8 + 2 * (lane % 4) + half] + 2 * (lane / 4);
            std::memcpy(shim::pointer_of(target, 2), &value, 2);
        }
    }
}

}  // namespace cupy_gmm
