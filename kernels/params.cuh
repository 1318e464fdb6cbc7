// What the host hands to the kernels: Params (the one by-value argument of a product), ScheduleParams, and the
// layout of the schedule table. Mirrored by cupy_gmm/_params.py; sizes and offsets are asserted here.
#pragma once

#include "ptx/types.cuh"

namespace cupy_gmm {

// One entry of the schedule: rows [first_row, end_row) belong to `group`, a local index into the weights;
// a group outside [0, groups) marks rows that are written as zeros.
struct alignas(16) RowBlock {
    i32 group;
    i32 first_row;
    i32 end_row;
    i32 n;  // end_row - first_row rounded up to the granule
};
static_assert(sizeof(RowBlock) == 16, "RowBlock is one 16-byte load");

// The schedule: int32 words
//   header (kHeaderWords) | bounds (groups + 1) | order (groups) | padding to 4 words | RowBlock[]
// bounds[g], bounds[g + 1] = effective first and end row of group g: running maximum, clamped to [0, rows].
// order = group ids by falling length, ties by rising id.
// Blocks stand in the order of their groups: by id, or by height, which is groups no shorter than the mean first, each
// of both by falling height of their blocks, then length, then rising id. Blocks of rows without a group stand last.
inline constexpr int kHeaderWords = 16;
enum HeaderWord : int {
    kNumBlocks = 0,
    kStatus = 1,
    kUsedRows = 2,
    kGroupOffset = 3,
    kGroups = 4,
    kRows = 5,
    kHeight = 6,
    kGranule = 7,
    kLongBlocks = 8,  // blocks that stand first: of groups no shorter than the mean
    kLongShare = 9,   // their share of the blocks of groups, in 2^-32, rounded up
    kTicket = 10,     // zero between launches: counter of forwards that leave it as they found it; 11..15 are zero
};
enum StatusBit : int { kNegative = 1, kDecreasing = 2, kBeyondRows = 4 };

struct Schedule {
    const i32* words;
    i32 groups;

    __device__ const i32* bounds() const { return words + kHeaderWords; }
    __device__ const i32* order() const { return bounds() + groups + 1; }
    __device__ const RowBlock* blocks() const {
        const i64 words_before = (kHeaderWords + 2 * static_cast<i64>(groups) + 1 + 3) / 4 * 4;
        return reinterpret_cast<const RowBlock*>(words + words_before);
    }
};

enum OutputType : i32 { kOutBf16 = 0, kOutFp16 = 1, kOutFp32 = 2 };
enum Flag : i32 {
    kVectorStore = 1,        // c: unit column stride, 16-byte base and pitches
    kAccumulate = 2,         // weight gradient: add to what stands in c
    kWholeColumnBlocks = 4,  // Hopper: w is MN-major and n (weight gradient: k and n) a multiple of 64
    kBoxStore = 8,           // Hopper's weight gradient: the copy engine can write c
};

inline constexpr int kTicketWords = 2;

// Forward and input gradient: c[r] = a[r] b[group of r], a (rows, k), b (groups, k, n), c (rows, n).
// Weight gradient: c[g] = a[rows of g]^T b[rows of g], a (rows, k), b (rows, n), c (groups, k, n).
// Strides count elements.
struct Params {
    const void* a;
    const void* b;
    void* c;
    const i32* schedule;
    i32* tickets;     // zero at launch, 8-byte aligned: kTicketWords of the next tile, arrivals of split groups' pieces
    i32* status;      // or null: word that collects the schedule's status bits
    float* partials;  // weight gradient: accumulators of the pieces of split groups, or null
    i64 a_row;
    i64 a_col;
    i64 b_group;
    i64 b_row;
    i64 b_col;
    i64 c_group;
    i64 c_row;
    i64 c_col;
    i32 rows;
    i32 k;
    i32 n;
    i32 groups;           // of b (forward) or c (weight gradient)
    i32 schedule_groups;  // of the schedule
    i32 max_blocks;       // row blocks that the table has room for
    i32 height;           // most rows of one of them
    i32 panel;            // column tiles that are walked together
    i32 chunk;            // weight gradient: rows of one piece of a split group
    i32 c_type;           // OutputType
    i32 flags;            // Flag
    i32 max_slots;        // weight gradient: pieces of split groups that there is scratch for
};
static_assert(sizeof(Params) == 168, "mirrored by cupy_gmm/_params.py");

struct ScheduleParams {
    const void* offs;         // (groups,) end offsets or sizes, int32 or int64
    const i32* group_offset;  // or null: then `group_offset_value`
    i32* table;
    i32* zeroed;  // or null: words that the product after this kernel wants zero
    i64 offs_stride;
    i32 groups;
    i32 rows;
    i32 height;   // most rows of a block
    i32 split;    // most rows of a block of a group that has several
    i32 granule;  // rows by which blocks of a group differ at most
    i32 group_offset_value;
    i32 num_groups;  // of the weights; INT_MAX when not known
    i32 max_blocks;
    i32 zeroed_words;
    i32 offs_is_int64;
    i32 by_height;       // blocks by height, else by id
    i32 offs_are_sizes;  // of groups: their running sum are the end offsets
};
static_assert(sizeof(ScheduleParams) == 88, "mirrored by cupy_gmm/_params.py");

struct SizesParams {
    const void* sizes;  // (groups,) rows of each group, int32 or int64
    i32* offs;          // (groups,) their running sum
    i64 sizes_stride;
    i32 groups;
    i32 sizes_are_int64;
};
static_assert(sizeof(SizesParams) == 32, "mirrored by cupy_gmm/_params.py");

}  // namespace cupy_gmm
