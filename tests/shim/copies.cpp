// The copy engine: boxes of a tensor, global -> shared, 128-byte swizzle. A box lands some time after it was issued, in
// any order; until then its target holds NaN.
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

void copy_box(unsigned target, const void* map, unsigned barrier, int rank, const int (&at)[4]) {
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
static bool find_line(const Copy& copy, unsigned line, uint64_t& address) {
    bool inside = true;
    address = copy.map.base;
    for (unsigned axis = 1; axis < copy.map.rank; ++axis) {
        const int64_t index = static_cast<int64_t>(copy.at[axis]) + line % copy.map.box[axis];
        line /= copy.map.box[axis];
        inside = inside && index >= 0 && static_cast<uint64_t>(index) < copy.map.extent[axis];
        address += static_cast<uint64_t>(index) * copy.map.stride[axis];
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
        const bool inside = find_line(copy, line, address);
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

}  // namespace shim
