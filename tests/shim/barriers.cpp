// Shared memory as 32-bit handles, and the barriers in it that threads and the copy engine arrive at.
#include "state.h"

namespace shim {

unsigned handle_of(const void* address) {
    const ptrdiff_t offset = static_cast<const char*>(address) - current->cta->shared;
    if (offset < 0 || offset >= static_cast<ptrdiff_t>(current->cta->bytes)) fail("an address is not in shared memory");
    return kFirstHandle + static_cast<unsigned>(offset);
}

char* pointer_of(unsigned handle, unsigned bytes) {
    const Cta& cta = *current->cta;
    if (handle < kFirstHandle || handle + bytes > kFirstHandle + cta.bytes) fail("an access outside shared memory");
    return cta.shared + (handle - kFirstHandle);
}

Barrier& barrier_at(Cta& cta, unsigned handle) {
    if (handle % 8 != 0 || handle < kFirstHandle || handle + 8 > kFirstHandle + cta.bytes)
        fail("no place of a barrier");
    return cta.barriers[(handle - kFirstHandle) / 8];
}

static Barrier& live_barrier(unsigned handle) {
    Barrier& barrier = barrier_at(*current->cta, handle);
    if (!barrier.live) fail("a barrier is used before it is initialised");
    return barrier;
}

void settle(Barrier& barrier) {
    if (barrier.pending > 0) return;
    if (barrier.bytes < 0) fail("more bytes landed than a phase expects");
    if (barrier.bytes > 0) return;
    ++barrier.phase;
    barrier.pending = barrier.arrivals;
    ++progress;
}

void barrier_init(unsigned handle, unsigned arrivals) {
    Barrier& barrier = barrier_at(*current->cta, handle);
    if (barrier.live) fail("a barrier is initialised twice");
    const int count = static_cast<int>(arrivals);
    barrier = {true, count, count, 0, 0};
}

void barrier_arrive(unsigned handle, unsigned arrivals, unsigned expected_bytes) {
    Barrier& barrier = live_barrier(handle);
    if (arrivals < 1 || static_cast<int>(arrivals) > barrier.pending) fail("an arrival beyond the barrier's count");
    barrier.bytes += expected_bytes;
    barrier.pending -= static_cast<int>(arrivals);
    ++progress;
    settle(barrier);
    maybe_yield(8);
}

bool barrier_try_wait(unsigned handle, unsigned parity) {
    maybe_yield(4);
    const Barrier& barrier = live_barrier(handle);
    if (parity > 1) fail("a parity above 1");
    const bool completed = (barrier.phase & 1) != parity;
    current->polled = completed ? 0 : handle;
    current->polled_parity = parity;
    if (!completed) maybe_yield(1);
    return completed;
}

}  // namespace shim
