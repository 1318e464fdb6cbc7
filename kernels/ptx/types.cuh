// Scalar types of known width and the two 16-bit storage types. Used by every kernel file.
// NVRTC has no <cstdint>; these aliases also hold under g++.
#pragma once

namespace cupy_gmm {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8, "scalar widths");

// Bit patterns only: arithmetic happens in float, conversions live in ptx/convert.cuh.
struct bf16 {
    u16 bits;
};
struct fp16 {
    u16 bits;
};

struct alignas(16) Vec16 {  // one 16-byte access
    u32 word[4];
};
struct alignas(8) Vec8 {
    u32 word[2];
};

}  // namespace cupy_gmm
