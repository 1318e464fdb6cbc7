// TileConfig: one tuning point of the portable kernels, its legality and what follows from it.
// Python renders it field by field (cupy_gmm/_config.py); a drifted name is a compile error.
#pragma once

namespace cupy_gmm {

inline constexpr int kTileK = 64;        // reduction elements of one stage: 64 * 2 bytes = one 128-byte line
inline constexpr int kElementBytes = 2;  // bf16 and fp16
inline constexpr int kChunkBytes = 16;   // what one thread copies at a time
inline constexpr int kChunkElements = kChunkBytes / kElementBytes;

struct TileConfig {
    int tile_m;        // rows of the output tile
    int tile_n;        // columns of the output tile
    int warps_m;       // warps along the rows; 16-row slices are dealt to them in turn
    int warps_n;       // warps along the columns
    int stages;        // slots of the load pipeline
    int min_ctas;      // CTAs an SM must be able to hold (caps the registers)
    int vector_bytes;  // 16: cp.async on aligned rows; 2: element loads at any stride and alignment

    constexpr int threads() const { return 32 * warps_m * warps_n; }
    constexpr int slices_m() const { return tile_m / (16 * warps_m); }
    constexpr int slices_n() const { return tile_n / (8 * warps_n); }
    constexpr int stage_bytes() const { return (tile_m + tile_n) * kTileK * kElementBytes; }
    constexpr int shared_bytes() const { return stages * stage_bytes(); }

    constexpr bool legal() const {
        return tile_m % (16 * warps_m) == 0 && tile_n % (32 * warps_n) == 0 && threads() % 64 == 0 && stages >= 2 &&
               (tile_m * 8) % threads() == 0 && (tile_n * 8) % threads() == 0 &&
               (vector_bytes == kChunkBytes || vector_bytes == kElementBytes) && shared_bytes() <= 232448;
    }
};

}  // namespace cupy_gmm
