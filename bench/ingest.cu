// How many bytes a clock an SM moves, by the copy engine, by its threads, or by both. Compiled by bench/ingest.py; does
// nothing with what it moves.
#include "params.cuh"
#include "pipeline.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/misc.cuh"
#include "ptx/tma.cuh"

namespace cupy_gmm {

inline constexpr int kPieceBytes = 32 << 10;  // 64 rows of 256 columns, eight of them side by side
inline constexpr int kPlaces = 6;             // pieces in flight
inline constexpr int kCopiers = 128;          // threads that copy
enum Way : i32 { kEngine = 1, kThreads = 2, kStores = 4 };

struct IngestParams {
    TensorMap loads;   // columns of a block, rows, blocks of 64 columns
    TensorMap stores;  // the same and one more axis, 64 columns by 64 rows
    char* memory;
    u64* clocks;  // by CTA
    i32 all;      // pieces that there are
    i32 apart;    // between the first pieces of two CTAs
    i32 each;     // pieces that a CTA moves, twice as many if it does so both ways
    i32 ways;     // of Way
};
static_assert(sizeof(IngestParams) == 320, "packed by ingest.py");

struct Ingest {
    const IngestParams& p;
    u32 barriers;
    u32 places;

    __device__ i32 piece(i32 nth) const {
        return static_cast<i32>((static_cast<i64>(blockIdx.x) * p.apart + nth) % p.all);
    }
    __device__ u32 barrier(i32 nth, i32 count) const { return barriers + nth % count * 8; }

    __device__ void load_by_engine(i32 count) const {
        for (i32 i = 0; i < p.each + count; ++i) {
            if (i >= count) wait_for(barrier(i, count), (i / count - 1) & 1);
            if (i >= p.each) continue;
            mbarrier_arrive_expect(barrier(i, count), kPieceBytes);
            tma_load_3d(places + i % count * kPieceBytes, &p.loads, barrier(i, count), 0, piece(i) / 8 * 64,
                        piece(i) % 8 * 4);
        }
    }

    __device__ void store_by_engine(i32 count) const {
        for (i32 i = 0; i < p.each; ++i) {
            for (i32 block = 0; block < 4; ++block) {
                tma_store_4d(&p.stores, places + i % count * kPieceBytes + block * kPieceBytes / 4, 0,
                             piece(i) / 8 * 64, piece(i) % 8 * 4 + block, 0);
            }
            tma_store_commit();
            tma_store_wait_read<kPlaces / 2 - 1>();
        }
        tma_store_wait<0>();
    }

    // Bytes in a row, where the engine takes boxes: the same lines of 128 bytes, of which a warp takes four.
    template <int kCount>
    __device__ void load_by_threads(i32 from, int thread) const {
        for (i32 i = 0; i < p.each; ++i) {
            cp_async_wait<kCount - 1>();
            const char* source = p.memory + static_cast<i64>(piece(i + from)) * kPieceBytes + thread * 16;
            const u32 target = places + (kPlaces - kCount + i % kCount) * kPieceBytes + thread * 16;
            for (int at = 0; at < kPieceBytes; at += kCopiers * 16) cp_async_16(target + at, source + at, 16);
            cp_async_commit();
        }
        cp_async_wait<0>();
    }

    __device__ void store_by_threads(i32 from, int thread) const {
        const float value = static_cast<float>(thread);
        for (i32 i = 0; i < p.each; ++i) {
            char* target = p.memory + static_cast<i64>(piece(i + from)) * kPieceBytes + thread * 16;
            for (int at = 0; at < kPieceBytes; at += kCopiers * 16) {
                store_through(reinterpret_cast<float*>(target + at), {value, value, value, value});
            }
        }
    }
};

}  // namespace cupy_gmm

extern "C" __global__ void __launch_bounds__(32 + cupy_gmm::kCopiers, 1)
    ingest(const __grid_constant__ cupy_gmm::IngestParams p) {
    using namespace cupy_gmm;
    alignas(1024) extern __shared__ char shared[];
    __shared__ alignas(8) u64 barriers[kPlaces];
    const Ingest ingest{p, shared_address(barriers), shared_address(shared)};
    if (threadIdx.x == 0) {
        for (i32 i = 0; i < kPlaces; ++i) mbarrier_init(ingest.barrier(i, kPlaces), 1);
        fence_mbarrier_init();
    }
    block_sync();
    const u64 began = clock64();
    const bool stores = (p.ways & kStores) != 0;
    const bool both = (p.ways & kEngine) != 0 && (p.ways & kThreads) != 0;
    if (threadIdx.x == 0 && (p.ways & kEngine) != 0) {
        const i32 count = both ? kPlaces / 2 : kPlaces;
        stores ? ingest.store_by_engine(count) : ingest.load_by_engine(count);
    } else if (threadIdx.x >= 32 && (p.ways & kThreads) != 0) {
        const int thread = static_cast<int>(threadIdx.x) - 32;
        const i32 from = both ? p.all / 2 : 0;
        if (stores) {
            ingest.store_by_threads(from, thread);
        } else if (both) {
            ingest.load_by_threads<kPlaces / 2>(from, thread);
        } else {
            ingest.load_by_threads<kPlaces>(from, thread);
        }
    }
    block_sync();
    if (threadIdx.x == 0) p.clocks[blockIdx.x] = clock64() - began;
}
