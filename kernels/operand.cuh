// One side of the product: how a (kExtent x 64) tile of it travels from global to shared memory and into fragments.
// "mn" is the side's own axis (rows of A, columns of B), "k" the reduction axis. Used by sm80/mainloop.cuh.
//
// Shared memory holds 128-byte lines; the 16-byte chunk c of line r stands at chunk c ^ (r % 8), so that ldmatrix
// and the copies meet every bank once.
//   kKMajor   line = one mn index, its 64 k elements                   (k is contiguous in global memory)
//   kMnMajor  line = one k index, 64 mn elements; blocks of 64 mn      (mn is contiguous in global memory)
//   kStrided  stored as kKMajor, loaded element by element             (any strides, any alignment)
#pragma once

#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/misc.cuh"
#include "ptx/types.cuh"

namespace cupy_gmm {

enum class Layout { kKMajor, kMnMajor, kStrided };

inline constexpr int kLineBytes = kTileK * kElementBytes;
inline constexpr int kLineChunks = kLineBytes / kChunkBytes;
static_assert(kLineBytes == 128 && kLineChunks == 8, "the swizzle works on 128-byte lines");

__device__ __forceinline__ int swizzled(int line, int chunk) {
    return line * kLineBytes + ((chunk ^ (line & 7)) * kChunkBytes);
}

// 0..16: how many bytes of the chunk that begins at `first` lie before `end`.
__device__ __forceinline__ u32 bytes_before(int first, int end) {
    const int elements = end - first;
    return elements >= kChunkElements ? kChunkBytes : elements > 0 ? static_cast<u32>(elements) * kElementBytes : 0u;
}

template <int kExtent, Layout kLayout, int kThreads>
struct Operand {
    static constexpr int kBytes = kExtent * kLineBytes;
    static constexpr int kChunksPerThread = kExtent * kLineChunks / kThreads;
    static constexpr int kLinesPerPass = kThreads / kLineChunks;
    // perf: passes in one go. A loop among the copies costs 10 % (bench/notes/0001-portable-forward.md); with few
    // threads all passes at once would take the registers of the product.
    static constexpr int kUnroll = kThreads >= 256 ? 8 : 4;
    static_assert(kLayout != Layout::kMnMajor || kExtent % 64 == 0, "MN-major tiles come in blocks of 64");
    static_assert(kLinesPerPass % 8 == 0, "a thread keeps its swizzle from pass to pass");

    const u16* base;  // element (mn = 0, k = 0) of the tile
    i64 mn_stride;
    i64 k_stride;
    int mn_end;  // valid mn indices of this tile: [0, mn_end)

    // Starts the copies of k indices [k, k + 64) into `tile`; what lies outside mn_end or k_end becomes zero.
    __device__ __forceinline__ void load(char* tile, int k, int k_end) const {
        if constexpr (kLayout == Layout::kStrided) {
            load_elements(tile, k, k_end);
        } else if (k + kTileK <= k_end && mn_end >= kExtent) {
            load_chunks<true>(tile, k, k_end);
        } else {
            load_chunks<false>(tile, k, k_end);
        }
    }

    // Fragment of A: mn [mn, mn + 16), k [16 * step, + 16).
    __device__ static __forceinline__ void load_a(u32 (&a)[4], u32 tile, int mn, int step) {
        const int lane = lane_id();
        if constexpr (kLayout == Layout::kMnMajor) {
            const int line = step * 16 + (lane & 7) + ((lane >> 4) << 3);
            ldmatrix_x4_trans(a, tile + block_of(mn) + swizzled(line, chunk_of(mn) + ((lane >> 3) & 1)));
        } else {
            ldmatrix_x4(a, tile + swizzled(mn + (lane & 15), step * 2 + (lane >> 4)));
        }
    }

    // Fragments of B for two neighbours: mn [mn, mn + 8) in b[0], b[1] and [mn + 8, mn + 16) in b[2], b[3].
    __device__ static __forceinline__ void load_b(u32 (&b)[4], u32 tile, int mn, int step) {
        const int lane = lane_id();
        if constexpr (kLayout == Layout::kMnMajor) {
            const int line = step * 16 + (lane & 15);
            ldmatrix_x4_trans(b, tile + block_of(mn) + swizzled(line, chunk_of(mn) + (lane >> 4)));
        } else {
            ldmatrix_x4(b, tile + swizzled(mn + (lane & 7) + ((lane >> 4) << 3), step * 2 + ((lane >> 3) & 1)));
        }
    }

   private:
    // kWhole: nothing of the tile lies outside, so no bounds are computed.
    template <bool kWhole>
    __device__ __forceinline__ void load_chunks(char* tile, int k, int k_end) const {
        const int chunk = static_cast<int>(threadIdx.x) % kLineChunks;
        const int line = static_cast<int>(threadIdx.x) / kLineChunks;
        const u32 target = shared_address(tile) + swizzled(line, chunk);
        if constexpr (kLayout == Layout::kKMajor) {
            const u16* source = base + line * mn_stride + k + chunk * kChunkElements;
            const u32 bytes = kWhole ? kChunkBytes : bytes_before(k + chunk * kChunkElements, k_end);
#pragma unroll kUnroll
            for (int pass = 0; pass < kChunksPerThread; ++pass) {
                const bool valid = kWhole || line + pass * kLinesPerPass < mn_end;
                copy<kWhole>(target + pass * kLinesPerPass * kLineBytes, source, valid ? bytes : 0u);
                source += kLinesPerPass * mn_stride;
            }
        } else {
            const u16* source = base + (k + line) * k_stride + chunk * kChunkElements;
#pragma unroll kUnroll / 2
            for (int pass = 0; pass < 64 / kLinesPerPass; ++pass) {
                const bool valid = kWhole || k + line + pass * kLinesPerPass < k_end;
#pragma unroll
                for (int block = 0; block < kExtent / 64; ++block) {
                    const u32 bytes = kWhole ? kChunkBytes : bytes_before(block * 64 + chunk * kChunkElements, mn_end);
                    copy<kWhole>(target + (block * 64 + pass * kLinesPerPass) * kLineBytes, source + block * 64,
                                 valid ? bytes : 0u);
                }
                source += kLinesPerPass * k_stride;
            }
        }
    }

    template <bool kWhole>
    __device__ __forceinline__ void copy(u32 target, const u16* source, u32 bytes) const {
        cp_async_16(target, kWhole || bytes != 0 ? source : base, kWhole ? kChunkBytes : bytes);
    }

    __device__ __forceinline__ void load_elements(char* tile, int k, int k_end) const {
        const int chunk = static_cast<int>(threadIdx.x) % kLineChunks;
        const int line = static_cast<int>(threadIdx.x) / kLineChunks;
#pragma unroll 1
        for (int pass = 0; pass < kChunksPerThread; ++pass) {
            const int mn = line + pass * kLinesPerPass;
            const int first = k + chunk * kChunkElements;
            const u16* source = base + mn * mn_stride + first * k_stride;
            Vec16 packed{};
#pragma unroll
            for (int e = 0; e < kChunkElements; ++e) {
                if (mn < mn_end && first + e < k_end) {
                    packed.word[e / 2] |= static_cast<u32>(source[e * k_stride]) << (16 * (e % 2));
                }
            }
            *reinterpret_cast<Vec16*>(tile + swizzled(mn, chunk)) = packed;
        }
    }

    __device__ static __forceinline__ int block_of(int mn) { return mn / 64 * 64 * kLineBytes; }
    __device__ static __forceinline__ int chunk_of(int mn) { return mn % 64 / kChunkElements; }
};

}  // namespace cupy_gmm
