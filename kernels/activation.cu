// h = silu(gate) * up and its gradient, rows of [gate | up]. Called by moe.py; launched by _rowwise.py.
// float32 inside, one rounding at the store. Knows nothing of groups: rows of zeros give rows of zeros.

#include "ptx/math.cuh"
#include "rows.cuh"

namespace cupy_gmm {

struct SiluParams {
    Rows gate_up;  // (rows, 2 * inner)
    Rows dh;       // (rows, inner), backward only
    Rows target;   // (rows, inner) forward, (rows, 2 * inner) backward
    i64 rows;
    i64 inner;  // accesses in one half of a row
    i32 lanes_log2;
    i32 reserved;
};
static_assert(sizeof(SiluParams) == 96, "mirrored by cupy_gmm/_rowwise.py");

// Without overflow for any finite gate: exp(-gate) = inf gives 0, exp(-gate) = 0 gives 1.
__device__ __forceinline__ float sigmoid(float gate) { return rcp_approx(1.0f + exp_f32(-gate)); }

template <class T, bool kWide>
__device__ __forceinline__ void silu_mul(const SiluParams& p) {
    using A = Access<T, kWide>;
    using Raw = typename A::Raw;
    const RowShare share = row_share(p.lanes_log2);
    if (share.row >= p.rows) return;
#pragma unroll 2
    for (i64 column = share.column; column < p.inner; column += share.stride) {
        float gate[A::kCount], up[A::kCount], h[A::kCount];
        A::decode(load_access<Raw>(p.gate_up, share.row, column), gate);
        A::decode(load_access<Raw>(p.gate_up, share.row, column + p.inner), up);
#pragma unroll
        for (int i = 0; i < A::kCount; ++i) h[i] = gate[i] * sigmoid(gate[i]) * up[i];
        *row_at<Raw>(p.target, share.row, column) = A::encode(h);
    }
}

// d_up = dh * silu(gate);  d_gate = dh * up * s * (1 + gate * (1 - s)), s = sigmoid(gate). The slope comes first in
// each product: where it is 0, large dh and up do not make inf * 0.
template <class T, bool kWide>
__device__ __forceinline__ void silu_mul_backward(const SiluParams& p) {
    using A = Access<T, kWide>;
    using Raw = typename A::Raw;
    const RowShare share = row_share(p.lanes_log2);
    if (share.row >= p.rows) return;
    for (i64 column = share.column; column < p.inner; column += share.stride) {
        float gate[A::kCount], up[A::kCount], dh[A::kCount];
        A::decode(load_access<Raw>(p.gate_up, share.row, column), gate);
        A::decode(load_access<Raw>(p.gate_up, share.row, column + p.inner), up);
        A::decode(load_access<Raw>(p.dh, share.row, column), dh);
#pragma unroll
        for (int i = 0; i < A::kCount; ++i) {
            const float s = sigmoid(gate[i]);
            const float slope = s * (1.0f + gate[i] * (1.0f - s));
            const float d_up = gate[i] * s * dh[i];
            gate[i] = slope * dh[i] * up[i];
            up[i] = d_up;
        }
        *row_at<Raw>(p.target, share.row, column) = A::encode(gate);
        *row_at<Raw>(p.target, share.row, column + p.inner) = A::encode(up);
    }
}

}  // namespace cupy_gmm

#define CUPY_GMM_KERNEL(NAME, SUFFIX, ...)                                \
    extern "C" __global__ void __launch_bounds__(cupy_gmm::kRowThreads)   \
        NAME##_##SUFFIX(const __grid_constant__ cupy_gmm::SiluParams p) { \
        cupy_gmm::NAME<__VA_ARGS__>(p);                                   \
    }
#define CUPY_GMM_KERNELS(NAME)                                 \
    CUPY_GMM_KERNEL(NAME, bfloat16_wide, cupy_gmm::bf16, true) \
    CUPY_GMM_KERNEL(NAME, bfloat16_any, cupy_gmm::bf16, false) \
    CUPY_GMM_KERNEL(NAME, float16_wide, cupy_gmm::fp16, true)  \
    CUPY_GMM_KERNEL(NAME, float16_any, cupy_gmm::fp16, false)  \
    CUPY_GMM_KERNEL(NAME, float32_wide, float, true)           \
    CUPY_GMM_KERNEL(NAME, float32_any, float, false)

CUPY_GMM_KERNELS(silu_mul)
CUPY_GMM_KERNELS(silu_mul_backward)
