// Tensor cores of a warpgroup: 64 x n += 64 x 16 * 16 x n, each thread its own accumulators. Shared memory is read as
// late as legal, at the wait that covers the product; until then the kernel's accumulators hold NaN.
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "ptx/convert.cuh"
#include "state.h"

namespace shim {

static constexpr int kProductK = 16;

// Both 16-bit types, decoded once.
static const std::array<std::array<float, 65536>, 2> kDecoded = [] {
    std::array<std::array<float, 65536>, 2> table;
    for (unsigned bits = 0; bits < 65536; ++bits) {
        table[0][bits] = cupy_gmm::unpack_bf16(static_cast<uint16_t>(bits));
        table[1][bits] = cupy_gmm::unpack_fp16(static_cast<uint16_t>(bits));
    }
    return table;
}();

static void check_descriptor(uint64_t descriptor) {
    if (descriptor >> 62 != 1) fail("a matrix descriptor without the 128-byte swizzle");
    if ((descriptor >> 46 & 0xffff) != 0) fail("a matrix descriptor with reserved bits");
}

// The set that these accumulators are, hidden from now on if they were not in flight.
static int set_of(float* accumulators, int n) {
    std::vector<Accumulators>& sets = current->sets;
    for (size_t i = 0; i < sets.size(); ++i) {
        if (sets[i].kernels == accumulators && sets[i].n == n) return static_cast<int>(i);
        if (accumulators < sets[i].kernels + sets[i].n / 2 && sets[i].kernels < accumulators + n / 2) {
            fail("other accumulators in the same registers are in flight");
        }
    }
    sets.push_back({accumulators, n, {}});
    std::memcpy(sets.back().hidden, accumulators, sizeof(float) * n / 2);
    for (int i = 0; i < n / 2; ++i) accumulators[i] = std::numeric_limits<float>::quiet_NaN();
    return static_cast<int>(sets.size()) - 1;
}

static void check_untouched(const Accumulators& set) {
    for (int i = 0; i < set.n / 2; ++i) {
        if (!std::isnan(set.kernels[i])) fail("accumulators are touched in flight");
    }
}

void product_issue(const Shape& shape, float* accumulators, uint64_t a, uint64_t b) {
    check_descriptor(a);
    check_descriptor(b);
    if (current->products.empty()) {
        current->sets.clear();
        current->commits = 0;
    }
    const int set = set_of(accumulators, shape.n);
    check_untouched(current->sets[set]);
    current->products.push_back({shape, set, a, b, current->commits});
}

void product_commit() { ++current->commits; }

// Element (mn, k) of the operand that a descriptor names. K-major: lines of 64 k, groups of eight lines `stride` bytes
// apart. MN-major: lines of 64 mn, eight k lines a group; the next 64 mn are `leading` bytes further.
static float element(uint64_t descriptor, bool half, bool transposed, int mn, int k) {
    const unsigned start = (descriptor & 0x3fff) << 4;
    const unsigned leading = (descriptor >> 16 & 0x3fff) << 4;
    const unsigned stride = (descriptor >> 32 & 0x3fff) << 4;
    const unsigned plain = transposed ? mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2
                                      : mn / 8 * stride + mn % 8 * 128 + k * 2;
    const unsigned swizzled = (start + plain) ^ (((start + plain) >> 7 & 7) << 4);
    uint16_t bits;
    std::memcpy(&bits, pointer_of(swizzled, 2), 2);
    return kDecoded[half][bits];
}

// This thread's part: rows 16 w + l / 4 and eight further down; of every eight columns 2 (l % 4) and the next.
static void execute(const Product& product) {
    const Shape& shape = product.shape;
    float* const hidden = current->sets[product.set].hidden;
    const int lane = current->thread % 32;
    const int first_row = current->thread % 128 / 32 * 16 + lane / 4;
    float a[2][kProductK];
    for (int k = 0; k < kProductK; ++k) {
        for (int half = 0; half < 2; ++half) {
            a[half][k] = element(product.a, shape.half, shape.a_transposed, first_row + 8 * half, k);
        }
    }
    for (int i = 0; i < shape.n / 4; ++i) {
        const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
        float upper = 0;
        float lower = 0;
        for (int k = 0; k < kProductK; ++k) {
            const float b = element(product.b, shape.half, shape.b_transposed, column, k);
            upper += a[0][k] * b;
            lower += a[1][k] * b;
        }
        hidden[i / 2 * 4 + i % 2] += upper;
        hidden[i / 2 * 4 + 2 + i % 2] += lower;
    }
}

void product_wait(int pending) {
    maybe_yield(4);
    std::deque<Product>& products = current->products;
    if (products.empty()) return;
    if (products.back().group == current->commits) fail("a wait for products that are not committed");
    while (!products.empty() && products.front().group < current->commits - pending) {
        execute(products.front());
        products.pop_front();
    }
    if (products.empty()) {
        for (const Accumulators& set : current->sets) {
            std::memcpy(set.kernels, set.hidden, sizeof(float) * set.n / 2);
        }
    }
}

}  // namespace shim
