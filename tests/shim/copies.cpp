// The copy engine: boxes of a tensor with 128-byte swizzle. A loaded box lands some time after it was issued, in any
// order; until then its target holds NaN. A stored box is read when its thread waits for it.
#include <cstring>

#include "state.h"

namespace shim {

static constexpr unsigned kLineBytes = 128;
static constexpr int kLineElements = 64;

static unsigned lines_of(const FakeMap& map) {
    unsigned lines = 1;
    for (unsigned axis = 1; axis < map.rank; ++axis) lines *= map.box[axis];
    return lines;
}

void copy_box(unsigned target, const void* map, unsigned barrier, int rank, const int (&at)[kMostAxes]) {
    Copy copy{};
    copy.target = target;
    copy.barrier = barrier;
    std::memcpy(&copy.map, map, sizeof(FakeMap));
    std::memcpy(copy.at, at, sizeof(copy.at));
    if (copy.map.magic != kMapMagic || copy.map.rank != static_cast<unsigned>(rank)) fail("no tensor map of this rank");
    if (copy.map.box[0] != kLineElements) fail("a box that is not 128 bytes wide");
    if (target % kLineBytes != 0) fail("a box lands on an unaligned address");
    const unsigned bytes = lines_of(copy.map) * kLineBytes;
    std::memset(pointer_of(target, bytes), 0xff, bytes);
    current->cta->copies.push_back(copy);
    ++progress;
    maybe_yield(4);
}

// Where a line of the box begins in global memory; addresses wrap as they do on the device. False: it is all zeros.
static bool find_line(const FakeMap& map, const int (&at)[kMostAxes], unsigned line, uint64_t& address) {
    bool inside = true;
    address = map.base;
    for (unsigned axis = 1; axis < map.rank; ++axis) {
        const int64_t index = static_cast<int64_t>(at[axis]) + line % map.box[axis];
        line /= map.box[axis];
        inside = inside && index >= 0 && static_cast<uint64_t>(index) < map.extent[axis];
        address += static_cast<uint64_t>(index) * map.stride[axis];
    }
    return inside;
}

static uint16_t read_element(const FakeMap& map, uint64_t line, int64_t column) {
    if (column < 0 || static_cast<uint64_t>(column) >= map.extent[0]) return 0;
    const uint64_t address = line + 2 * static_cast<uint64_t>(column);
    if (address < map.low || address + 2 > map.high) fail("the copy engine reads outside the operand");
    uint16_t value;
    std::memcpy(&value, reinterpret_cast<const void*>(address), 2);
    return value;
}

void land_copy(Cta& cta, size_t which) {
    const Copy copy = cta.copies[which];
    cta.copies.erase(cta.copies.begin() + static_cast<ptrdiff_t>(which));
    const unsigned lines = lines_of(copy.map);
    for (unsigned line = 0; line < lines; ++line) {
        uint64_t address;
        const bool inside = find_line(copy.map, copy.at, line, address);
        for (int i = 0; i < kLineElements; ++i) {
            const uint16_t value = inside ? read_element(copy.map, address, static_cast<int64_t>(copy.at[0]) + i) : 0;
            const unsigned plain = copy.target + line * kLineBytes + i * 2;
            const unsigned swizzled = plain ^ ((plain >> 7 & 7) << 4);
            std::memcpy(cta.shared + (swizzled - kFirstHandle), &value, 2);
        }
    }
    Barrier& barrier = barrier_at(cta, copy.barrier);
    if (!barrier.live) fail("a copy completes on a barrier that is not initialised");
    barrier.bytes -= lines * kLineBytes;
    ++progress;
    settle(barrier);
}

void store_box(unsigned source, const void* map, int rank, const int (&at)[kMostAxes]) {
    Store store{};
    store.source = source;
    std::memcpy(&store.map, map, sizeof(FakeMap));
    std::memcpy(store.at, at, sizeof(store.at));
    store.group = current->store_commits;
    if (store.map.magic != kMapMagic || store.map.rank != static_cast<unsigned>(rank))
        fail("no tensor map of this rank");
    if (store.map.box[0] != kLineElements) fail("a box that is not 128 bytes wide");
    if (source % kLineBytes != 0) fail("a box is stored from an unaligned address");
    current->stores.push_back(store);
}

void store_commit() { ++current->store_commits; }

static void execute(const Store& store) {
    for (unsigned line = 0; line < lines_of(store.map); ++line) {
        uint64_t address;
        if (!find_line(store.map, store.at, line, address)) continue;
        for (int i = 0; i < kLineElements; ++i) {
            const int64_t column = static_cast<int64_t>(store.at[0]) + i;
            // Seen on an H200: 16 bytes of which the first element exists are written whole.
            if (column < 0 || static_cast<uint64_t>(column / 8 * 8) >= store.map.extent[0]) continue;
            const uint64_t to = address + 2 * static_cast<uint64_t>(column);
            if (to < store.map.low || to + 2 > store.map.high) fail("the copy engine writes outside the result");
            const unsigned plain = store.source + line * kLineBytes + i * 2;
            std::memcpy(reinterpret_cast<void*>(to), pointer_of(plain ^ ((plain >> 7 & 7) << 4), 2), 2);
        }
    }
}

void store_wait(int pending) {
    maybe_yield(4);
    std::deque<Store>& stores = current->stores;
    if (!stores.empty() && stores.back().group == current->store_commits)
        fail("a wait for stores that are not committed");
    while (!stores.empty() && stores.front().group < current->store_commits - pending) {
        execute(stores.front());
        stores.pop_front();
        ++progress;
    }
}

}  // namespace shim
