// The loop that runs the fibers: in rising, falling or shuffled order, with warps and CTAs that sleep for a while.
// Rounds without progress are counted, so that a deadlock becomes a message.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "state.h"

namespace shim {

static constexpr int kPatience = 200;  // rounds without progress

class Launch {
   public:
    Launch(unsigned grid, int threads, unsigned shared_bytes, int seed);
    void run();

   private:
    Fiber* cta_fibers(unsigned cta) { return fibers_.data() + cta * threads_; }
    void begin(Fiber& fiber, int index);
    void round();
    void put_to_sleep();
    void release_warps();
    void release_block(Fiber* fibers);
    void release_named(Fiber* fibers);
    void land_some(Cta& cta);
    void check_stall(long before);
    std::string who_waits() const;

    struct Free {
        void operator()(char* memory) const { std::free(memory); }
    };
    using Memory = std::unique_ptr<char, Free>;

    int threads_;
    int seed_;
    std::vector<Memory> memory_;
    std::vector<Cta> ctas_;
    std::vector<Fiber> fibers_;
    std::vector<int> order_;
    std::vector<int> sleeping_;  // rounds that a warp will not run
    unsigned sleeping_cta_ = 0;
    int done_ = 0;
    int stalled_ = 0;    // rounds in which nobody slept and nothing went on
    bool idle_ = false;  // nothing went on in the last round: then nobody new goes to sleep
};

Launch::Launch(unsigned grid, int threads, unsigned shared_bytes, int seed)
    : threads_(threads), seed_(seed), ctas_(grid), fibers_(grid * threads), sleeping_(grid * threads / 32, 0) {
    for (unsigned i = 0; i < grid; ++i) {
        memory_.emplace_back(static_cast<char*>(std::aligned_alloc(1024, shared_bytes)));
        std::memset(memory_.back().get(), 0xff, shared_bytes);  // NaN in every type
        ctas_[i] = {i, shared_bytes, memory_.back().get(), std::vector<Barrier>(shared_bytes / 8), {}};
    }
    for (size_t i = 0; i < fibers_.size(); ++i) begin(fibers_[i], static_cast<int>(i));
    for (size_t i = 0; i < fibers_.size(); ++i) order_.push_back(static_cast<int>(i));
    if (seed % 3 == 1) std::reverse(order_.begin(), order_.end());
    gridDim = {grid, 1, 1};
    blockDim = {static_cast<unsigned>(threads), 1, 1};
}

void Launch::begin(Fiber& fiber, int index) {
    memory_.emplace_back(static_cast<char*>(std::aligned_alloc(64, kStackBytes)));
    fiber.stack = memory_.back().get();
    fiber.cta = &ctas_[index / threads_];
    fiber.thread = index % threads_;
    prepare(fiber);
}

void Launch::put_to_sleep() {
    static constexpr int kRounds[] = {3, 20, 100, 400};
    const unsigned grid = static_cast<unsigned>(ctas_.size());
    sleeping_cta_ = grid > 1 && one_in(2) ? random_bits() % grid : grid;
    for (int& rounds : sleeping_) rounds = std::max(rounds - 1, 0);
    if (!idle_ && one_in(12)) sleeping_[random_bits() % sleeping_.size()] = kRounds[random_bits() % 4];
}

void Launch::round() {
    if (seed_ % 3 == 2 && one_in(4)) std::shuffle(order_.begin(), order_.end(), random_bits);
    put_to_sleep();
    done_ = 0;
    for (int i : order_) {
        Fiber& fiber = fibers_[i];
        done_ += fiber.done;
        const bool asleep = fiber.cta->index == sleeping_cta_ || sleeping_[i / 32] > 0;
        if (fiber.done || asleep || fiber.waits != Waits::kNothing) continue;
        resume(fiber);
    }
}

void Launch::release_warps() {
    for (size_t first = 0; first < fibers_.size(); first += 32) {
        Fiber* lanes = &fibers_[first];
        if (!std::all_of(lanes, lanes + 32, [](const Fiber& f) { return !f.done && f.waits == Waits::kWarp; }))
            continue;
        for (int to = 0; to < 32; ++to) {
            if (lanes[to].kind != lanes[0].kind) fail("the lanes of a warp are at different collectives");
            for (int from = 0; from < 32; ++from) lanes[to].all[from] = lanes[from].value;
            lanes[to].waits = Waits::kNothing;
        }
        ++progress;
    }
}

void Launch::release_block(Fiber* fibers) {
    if (!std::all_of(fibers, fibers + threads_, [](const Fiber& f) { return f.waits == Waits::kBlock; })) return;
    for (int i = 0; i < threads_; ++i) fibers[i].waits = Waits::kNothing;
    ++progress;
}

void Launch::release_named(Fiber* fibers) {
    std::vector<Fiber*> waiting[kNamedBarriers];
    for (int i = 0; i < threads_; ++i) {
        if (fibers[i].waits == Waits::kNamed) waiting[fibers[i].named].push_back(&fibers[i]);
    }
    for (const std::vector<Fiber*>& at : waiting) {
        if (at.empty()) continue;
        const size_t wanted = static_cast<size_t>(at[0]->named_threads);
        for (const Fiber* fiber : at) {
            if (fiber->named_threads != at[0]->named_threads) fail("threads disagree on a named barrier's count");
        }
        if (at.size() > wanted) fail("more threads than its count at a named barrier");
        if (at.size() < wanted) continue;
        for (Fiber* fiber : at) fiber->waits = Waits::kNothing;
        ++progress;
    }
}

void Launch::land_some(Cta& cta) {
    const size_t tries = cta.copies.size();
    for (size_t i = 0; i < tries; ++i) {
        if (one_in(4)) land_copy(cta, random_bits() % cta.copies.size());
    }
}

std::string Launch::who_waits() const {
    std::string text = "deadlock:";
    for (size_t i = 0; i < fibers_.size(); i += 32) {
        const Fiber& fiber = fibers_[i];
        if (fiber.done) continue;
        text += " [CTA " + std::to_string(fiber.cta->index) + ", warp " + std::to_string(fiber.thread / 32) +
                ", in state " + std::to_string(static_cast<int>(fiber.waits)) + ", at barrier " +
                std::to_string(fiber.polled) + ", parity " + std::to_string(fiber.polled_parity) + "]";
    }
    return text;
}

void Launch::check_stall(long before) {
    const bool asleep = std::any_of(sleeping_.begin(), sleeping_.end(), [](int rounds) { return rounds > 0; });
    const bool flying = std::any_of(ctas_.begin(), ctas_.end(), [](const Cta& cta) { return !cta.copies.empty(); });
    idle_ = progress == before;
    if (!idle_) stalled_ = 0;
    if (idle_ && !asleep && !flying) ++stalled_;
    if (stalled_ > kPatience) fail(who_waits());
}

void Launch::run() {
    for (;;) {
        const long before = progress;
        round();
        if (done_ == static_cast<int>(fibers_.size())) break;
        release_warps();
        for (Cta& cta : ctas_) {
            release_block(cta_fibers(cta.index));
            release_named(cta_fibers(cta.index));
            land_some(cta);
        }
        check_stall(before);
    }
    for (const Cta& cta : ctas_) {
        if (!cta.copies.empty()) fail("a CTA ends with copies in flight");
    }
}

std::string launch(const std::function<void()>& kernel, unsigned grid, int threads, unsigned shared_bytes, int seed) {
    begin_fibers(kernel, seed);
    try {
        Launch(grid, threads, shared_bytes, seed).run();
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "";
}

}  // namespace shim
