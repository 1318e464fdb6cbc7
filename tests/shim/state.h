// The state of one launch: fibers, CTAs and what is in flight. Shared by the parts of the machine, unknown to kernels.
#pragma once

#include <deque>
#include <random>
#include <vector>

#include "machine.h"

namespace shim {

inline constexpr unsigned kFirstHandle = 1024;  // so that a null handle is caught
inline constexpr int kNamedBarriers = 16;

struct Barrier {
    bool live = false;
    int arrivals = 0;
    int pending = 0;  // arrivals that the phase still waits for
    long bytes = 0;   // expected minus landed
    unsigned phase = 0;
};

struct Copy {
    unsigned target;
    unsigned barrier;
    FakeMap map;  // taken at issue: a by-value parameter lives on the stack of the fiber
    int at[kMostAxes];
};

struct Cta {
    unsigned index;
    unsigned bytes;
    char* shared;
    std::vector<Barrier> barriers;  // by handle
    std::vector<Copy> copies;       // in flight, in no order
};

struct Product {
    Shape shape;
    int set;  // of accumulators
    uint64_t a;
    uint64_t b;
    int group;  // commits before it
};

struct Store {
    unsigned source;
    FakeMap map;
    int at[kMostAxes];
    int group;  // commits before it
};

struct Accumulators {
    float* kernels;  // own
    int n;           // of the products: n / 2 values
    float hidden[128];
};

enum class Waits { kNothing, kBlock, kWarp, kNamed };

struct Fiber {
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    Cta* cta = nullptr;
    int thread = 0;
    bool done = false;
    Waits waits = Waits::kNothing;
    int kind = 0;  // of the warp collective
    uint64_t value = 0;
    uint64_t all[32] = {};
    int named = 0;
    int named_threads = 0;
    unsigned polled = 0;  // the barrier that it found not ready, for the message of a deadlock
    unsigned polled_parity = 0;
    // Products in flight, and the accumulators' true values while the kernel's own hold NaN.
    std::deque<Product> products;
    int commits = 0;
    std::vector<Accumulators> sets;
    // Stores of boxes that have not read shared memory yet, and how many groups were committed.
    std::deque<Store> stores;
    int store_commits = 0;
};

extern Fiber* current;  // null while the scheduler itself runs
extern std::mt19937_64 random_bits;
extern long progress;  // counts whatever may let another fiber go on

// fibers.cpp
inline constexpr int kStackBytes = 96 << 10;
void begin_fibers(const std::function<void()>& kernel, int seed);
void prepare(Fiber& fiber);
void resume(Fiber& fiber);  // until it gives way; throws what it failed with
bool one_in(int odds);

Barrier& barrier_at(Cta& cta, unsigned handle);
void settle(Barrier& barrier);           // ends the phase when nothing is pending
void land_copy(Cta& cta, size_t which);  // one copy that is in flight

}  // namespace shim
