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
    i32 begin;    // the first piece of the first CTA
    i32 apart;    // between the first pieces of two CTAs
    i32 each;     // pieces that a CTA moves: half of them by engine and threads each, if by both
    i32 ways;     // of Way
};
static_assert(sizeof(IngestParams) == 320, "packed by ingest.py");

// kCount: of the places, the first ones are the engine's, the last ones the threads'.
struct Ingest {
    const IngestParams& p;
    u32 barriers;
    u32 places;

    // perf: a remainder or a division for each piece, by what the compiler does not know, takes the one thread that
    // loads as long as the copy of that piece (bench/notes/0009-what-an-sm-takes-in.md): pieces and places are counted
    // by comparing.
    __device__ i32 first(i32 from) const { return (p.begin + static_cast<i32>(blockIdx.x) * p.apart + from) % p.all; }
    __device__ i32 after(i32 piece) const { return piece + 1 == p.all ? 0 : piece + 1; }

    template <int kCount>
    __device__ void load_by_engine(i32 pieces) const {
        RingPosition<kCount> at;
        i32 piece = first(0);
        for (i32 i = 0; i < pieces + kCount; ++i) {
            const u32 barrier = barriers + at.slot * 8;
            if (i >= kCount) wait_for(barrier, at.phase ^ 1);  // what was copied a round ago is there
            if (i < pieces) {
                mbarrier_arrive_expect(barrier, kPieceBytes);
                tma_load_3d(places + at.slot * kPieceBytes, &p.loads, barrier, 0, piece / 8 * 64, piece % 8 * 4);
                piece = after(piece);
            }
            at.advance();
        }
    }

    template <int kCount>
    __device__ void store_by_engine(i32 pieces) const {
        RingPosition<kCount> at;
        i32 piece = first(0);
        for (i32 i = 0; i < pieces; ++i) {
            for (i32 block = 0; block < 4; ++block) {
                tma_store_4d(&p.stores, places + at.slot * kPieceBytes + block * kPieceBytes / 4, 0, piece / 8 * 64,
                             piece % 8 * 4 + block, 0);
            }
            tma_store_commit();
            tma_store_wait_read<kCount - 1>();
            piece = after(piece);
            at.advance();
        }
        tma_store_wait<0>();
    }

    // Bytes in a row, where the engine takes boxes: the same lines of 128 bytes, of which a warp takes four.
    template <int kCount>
    __device__ void load_by_threads(i32 from, i32 pieces, int thread) const {
        RingPosition<kCount> at;
        i32 piece = first(from);
        for (i32 i = 0; i < pieces; ++i) {
            cp_async_wait<kCount - 1>();
            const char* source = p.memory + static_cast<i64>(piece) * kPieceBytes + thread * 16;
            const u32 target = places + (kPlaces - kCount + at.slot) * kPieceBytes + thread * 16;
#pragma unroll
            for (int byte = 0; byte < kPieceBytes; byte += kCopiers * 16) {
                cp_async_16(target + byte, source + byte, 16);
            }
            cp_async_commit();
            piece = after(piece);
            at.advance();
        }
        cp_async_wait<0>();
    }

    __device__ void store_by_threads(i32 from, i32 pieces, int thread) const {
        const float value = static_cast<float>(thread);
        i32 piece = first(from);
        for (i32 i = 0; i < pieces; ++i) {
            char* target = p.memory + static_cast<i64>(piece) * kPieceBytes + thread * 16;
#pragma unroll
            for (int byte = 0; byte < kPieceBytes; byte += kCopiers * 16) {
                store_through(reinterpret_cast<float*>(target + byte), {value, value, value, value});
            }
            piece = after(piece);
        }
    }

    // What this thread does; the threads go on where the engine's pieces end.
    template <int kCount>
    __device__ void move(i32 from, i32 pieces) const {
        const bool stores = (p.ways & kStores) != 0;
        if (threadIdx.x == 0 && (p.ways & kEngine) != 0) {
            stores ? store_by_engine<kCount>(pieces) : load_by_engine<kCount>(pieces);
        } else if (threadIdx.x >= 32 && (p.ways & kThreads) != 0) {
            const int thread = static_cast<int>(threadIdx.x) - 32;
            stores ? store_by_threads(from, pieces, thread) : load_by_threads<kCount>(from, pieces, thread);
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
        for (i32 i = 0; i < kPlaces; ++i) mbarrier_init(ingest.barriers + i * 8, 1);
        fence_mbarrier_init();
    }
    block_sync();
    const u64 began = clock64();
    if ((p.ways & (kEngine | kThreads)) == (kEngine | kThreads)) {
        ingest.move<kPlaces / 2>(p.each / 2, p.each / 2);
    } else {
        ingest.move<kPlaces>(0, p.each);
    }
    block_sync();
    if (threadIdx.x == 0) p.clocks[blockIdx.x] = clock64() - began;
}
