// Everything between the router's choice and the expert products: the stable order (route.cuh), rows into that order
// (permute), rows back to their tokens (combine; also the gradient of permute), and the gradient of combine.
// Called by cupy_gmm/routing.py through _rowwise.py.
//
// `order`, `inverse` and `offs` may come from the user and hold anything. An assignment is live when its position is
// below the last offset and both arrays agree on it; all others count as dropped. Hence every row of a target has
// exactly one writer, whatever the arrays hold.
#include "ptx/math.cuh"
#include "ptx/misc.cuh"
#include "route.cuh"
#include "rows.cuh"

namespace cupy_gmm {

inline constexpr int kBatch = 4;  // accesses that a thread has in flight

enum WeightType : i32 { kWeightFp32 = 0, kWeightBf16 = 1, kWeightFp16 = 2 };

struct MoveParams {
    const i32* order;    // (tokens * slots,)
    const i32* inverse;  // (tokens * slots,)
    const i32* offs;     // (experts,)
    Rows source;         // permute: x (tokens, h); combine and its gradient: y (tokens * slots, h)
    Rows target;         // permute: (tokens * slots, h); combine: (tokens, h); its gradient: d_y
    Rows grad;           // gradient of combine: dy (tokens, h)
    Rows weights;        // (tokens, slots), pitch and step in elements; null data: all 1
    float* weight_grad;  // (tokens * slots,)
    i64 width;           // accesses in a row
    i32 tokens;
    i32 slots;
    i32 experts;
    i32 lanes_log2;
    i32 weight_type;
    i32 reserved;
};
static_assert(sizeof(MoveParams) == 160, "mirrored by cupy_gmm/_rowwise.py");

__device__ __forceinline__ i32 assignments(const MoveParams& p) { return p.tokens * p.slots; }

__device__ __forceinline__ i32 used_rows(const MoveParams& p) {
    const i32 end = p.experts > 0 ? p.offs[p.experts - 1] : 0;
    return end < 0 ? 0 : end < assignments(p) ? end : assignments(p);
}

// The row of a live assignment, else -1.
__device__ __forceinline__ i32 live_row(const MoveParams& p, i32 assignment, i32 used) {
    const i32 row = p.inverse[assignment];
    if (row < 0 || row >= used) return -1;
    return p.order[row] == assignment ? row : -1;
}

// Whether some live assignment has this row.
__device__ __forceinline__ bool row_is_live(const MoveParams& p, i32 row, i32 used) {
    if (row >= used) return false;
    const i32 assignment = p.order[row];
    return assignment >= 0 && assignment < assignments(p) && p.inverse[assignment] == row;
}

__device__ __forceinline__ float weight_of(const MoveParams& p, i32 token, i32 slot) {
    if (p.weights.data == nullptr) return 1.0f;
    if (p.weight_type == kWeightFp32) return *row_at<float>(p.weights, token, slot);
    if (p.weight_type == kWeightBf16) return Convert<bf16>::load(*row_at<bf16>(p.weights, token, slot));
    return Convert<fp16>::load(*row_at<fp16>(p.weights, token, slot));
}

template <class Raw>
__device__ __forceinline__ void zero_row(const Rows& rows, i64 row, i64 column, i64 stride, i64 width) {
#pragma unroll 1
    for (; column < width; column += stride) *row_at<Raw>(rows, row, column) = Raw{};
}

// One row of threads an assignment: copies its token's row to its position, and clears the row of its own number
// where no assignment lives.
template <class Raw>
__device__ __forceinline__ void permute_rows(const MoveParams& p) {
    const RowShare share = row_share(p.lanes_log2);
    if (share.row >= assignments(p)) return;
    const i32 assignment = static_cast<i32>(share.row);
    const i32 used = used_rows(p);
    const i32 row = live_row(p, assignment, used);
    const i32 token = assignment / p.slots;
#pragma unroll 1
    for (i64 column = share.column; row >= 0 && column < p.width; column += kBatch * share.stride) {
        Raw part[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            const i64 at = column + b * share.stride;
            if (at < p.width) part[b] = load_access<Raw>(p.source, token, at);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            const i64 at = column + b * share.stride;
            if (at < p.width) *row_at<Raw>(p.target, row, at) = part[b];
        }
    }
    if (!row_is_live(p, assignment, used)) zero_row<Raw>(p.target, assignment, share.column, share.stride, p.width);
}

// One row of threads a token: sum over its live slots in slot order; product and sum are rounded one by one, so that
// the NumPy twin gives the same bits.
template <class T, bool kWide>
__device__ __forceinline__ void combine_rows(const MoveParams& p) {
    using A = Access<T, kWide>;
    using Raw = typename A::Raw;
    const RowShare share = row_share(p.lanes_log2);
    if (share.row >= p.tokens) return;
    const i32 token = static_cast<i32>(share.row);
    const i32 used = used_rows(p);
    for (i64 column = share.column; column < p.width; column += share.stride) {
        float sum[A::kCount] = {};
        for (i32 first = 0; first < p.slots; first += kBatch) {
            Raw part[kBatch];
            i32 row[kBatch];
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                row[b] = first + b < p.slots ? live_row(p, token * p.slots + first + b, used) : -1;
                if (row[b] >= 0) part[b] = load_access<Raw>(p.source, row[b], column);
            }
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
                if (row[b] < 0) continue;
                const float weight = weight_of(p, token, first + b);
                float value[A::kCount];
                A::decode(part[b], value);
#pragma unroll
                for (int i = 0; i < A::kCount; ++i) sum[i] = add_rn(sum[i], mul_rn(weight, value[i]));
            }
        }
        *row_at<Raw>(p.target, token, column) = A::encode(sum);
    }
}

// One warp an assignment: d_y[row] = weight * dy[token], weight_grad = <dy[token], y[row]>. Each lane sums its own
// columns, the lanes are added as a butterfly: the order is fixed by the width alone.
template <class T, bool kWide>
__device__ __forceinline__ void combine_rows_backward(const MoveParams& p) {
    using A = Access<T, kWide>;
    using Raw = typename A::Raw;
    const i64 index = static_cast<i64>(blockIdx.x) * (kRowThreads / 32) + threadIdx.x / 32;
    if (index >= assignments(p)) return;
    const i32 assignment = static_cast<i32>(index);
    const i32 token = assignment / p.slots;
    const i32 used = used_rows(p);
    const i32 row = live_row(p, assignment, used);
    float dot = 0.0f;
    if (row >= 0) {
        const float weight = weight_of(p, token, assignment - token * p.slots);
#pragma unroll 2
        for (i64 column = lane_id(); column < p.width; column += 32) {
            float grad[A::kCount], value[A::kCount];
            A::decode(load_access<Raw>(p.grad, token, column), grad);
            A::decode(load_access<Raw>(p.source, row, column), value);
#pragma unroll
            for (int i = 0; i < A::kCount; ++i) {
                dot += grad[i] * value[i];
                grad[i] = mul_rn(weight, grad[i]);
            }
            *row_at<Raw>(p.target, row, column) = A::encode(grad);
        }
    }
    for (int mask = 16; mask > 0; mask /= 2) dot += warp_shfl_xor(dot, mask);
    if (lane_id() == 0) p.weight_grad[assignment] = dot;
    if (!row_is_live(p, assignment, used)) zero_row<Raw>(p.target, assignment, lane_id(), 32, p.width);
}

}  // namespace cupy_gmm

#define CUPY_GMM_KERNEL(NAME, SUFFIX, ...)                                 \
    extern "C" __global__ void __launch_bounds__(cupy_gmm::kRowThreads, 4) \
        NAME##_##SUFFIX(const __grid_constant__ cupy_gmm::MoveParams p) {  \
        cupy_gmm::NAME<__VA_ARGS__>(p);                                    \
    }
#define CUPY_GMM_KERNELS(NAME)                                 \
    CUPY_GMM_KERNEL(NAME, bfloat16_wide, cupy_gmm::bf16, true) \
    CUPY_GMM_KERNEL(NAME, bfloat16_any, cupy_gmm::bf16, false) \
    CUPY_GMM_KERNEL(NAME, float16_wide, cupy_gmm::fp16, true)  \
    CUPY_GMM_KERNEL(NAME, float16_any, cupy_gmm::fp16, false)  \
    CUPY_GMM_KERNEL(NAME, float32_wide, float, true)           \
    CUPY_GMM_KERNEL(NAME, float32_any, float, false)

CUPY_GMM_KERNEL(permute_rows, wide, cupy_gmm::Vec16)
CUPY_GMM_KERNEL(permute_rows, 2_bytes, cupy_gmm::u16)
CUPY_GMM_KERNEL(permute_rows, 4_bytes, cupy_gmm::u32)
CUPY_GMM_KERNELS(combine_rows)
CUPY_GMM_KERNELS(combine_rows_backward)
