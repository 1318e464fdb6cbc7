// Twin of kernels/ptx/convert.cuh: round to nearest even; NaN becomes 0x7fff, as on the device.
#pragma once

#include <cstring>

#include "types.cuh"

namespace cupy_gmm {

inline u16 round_to_bf16(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline u16 round_to_fp16(float value) {
    if (value != value) return 0x7fff;
    const _Float16 rounded = static_cast<_Float16>(value);
    u16 bits;
    std::memcpy(&bits, &rounded, 2);
    return bits;
}

inline u32 pack_bf16(float low, float high) { return round_to_bf16(low) | static_cast<u32>(round_to_bf16(high)) << 16; }
inline u32 pack_fp16(float low, float high) { return round_to_fp16(low) | static_cast<u32>(round_to_fp16(high)) << 16; }

inline float unpack_fp16(u16 bits) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
}

inline float unpack_bf16(u16 bits) {
    const u32 wide = static_cast<u32>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

template <class T>
struct Convert;

template <>
struct Convert<bf16> {
    static float load(bf16 value) { return unpack_bf16(value.bits); }
    static u32 pack(float low, float high) { return pack_bf16(low, high); }
    static bf16 store(float value) { return bf16{round_to_bf16(value)}; }
};

template <>
struct Convert<fp16> {
    static float load(fp16 value) { return unpack_fp16(value.bits); }
    static u32 pack(float low, float high) { return pack_fp16(low, high); }
    static fp16 store(float value) { return fp16{round_to_fp16(value)}; }
};

}  // namespace cupy_gmm
