// What the twins in ptx/ ask of the emulated multiprocessor. Addresses of shared memory are 32-bit handles, as on the
// device. Everything here is called by a fiber; whatever breaks a rule of the ISA ends the launch with a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace shim {

// The launch ends with this message; the fiber is never resumed.
[[noreturn]] void fail(const std::string& message);

// Threads (fibers.cpp)
void meet_block();
void meet_named(int barrier, int threads);
// Every lane of the warp hands in `value` and gets those of all; `kind` must be alike, or the warp has diverged.
void exchange_in_warp(int kind, uint64_t value, uint64_t (&all)[32]);
// Lets other fibers run, one time in `odds`.
void maybe_yield(int odds);

// Shared memory (barriers.cpp)
unsigned handle_of(const void* address);
char* pointer_of(unsigned handle, unsigned bytes);

// Barriers in shared memory (barriers.cpp)
void barrier_init(unsigned barrier, unsigned arrivals);
void barrier_arrive(unsigned barrier, unsigned arrivals, unsigned expected_bytes);
bool barrier_try_wait(unsigned barrier, unsigned parity);

// Copy engine (copies.cpp): what the 128 bytes of a tensor map hold here; packed by test_hopper_on_cpu.py.
inline constexpr int kMostAxes = 5;
struct FakeMap {
    uint64_t base;
    uint64_t low;  // the operand's memory: no element outside of it may be read
    uint64_t high;
    uint32_t magic;
    uint32_t rank;
    uint16_t box[kMostAxes];
    uint64_t extent[kMostAxes];
    uint64_t stride[kMostAxes];  // bytes
};
inline constexpr uint32_t kMapMagic = 0x7a5a1234;
static_assert(sizeof(FakeMap) == 128, "packed by test_hopper_on_cpu.py");

void copy_box(unsigned target, const void* map, unsigned barrier, int rank, const int (&at)[kMostAxes]);
// Stores read shared memory as late as legal, at the wait that covers them.
void store_box(unsigned source, const void* map, int rank, const int (&at)[kMostAxes]);
void store_commit();
void store_wait(int pending);

// Tensor cores (products.cpp)
struct Shape {
    bool half;  // fp16, else bf16
    int n;
    bool a_transposed;  // MN-major in shared memory
    bool b_transposed;
};
void product_issue(const Shape& shape, float* accumulators, uint64_t a, uint64_t b);
void product_commit();
void product_wait(int pending);

// One launch (scheduler.cpp): `kernel` by every thread of `grid` CTAs. Returns what went wrong, or nothing.
std::string launch(const std::function<void()>& kernel, unsigned grid, int threads, unsigned shared_bytes, int seed);

}  // namespace shim
