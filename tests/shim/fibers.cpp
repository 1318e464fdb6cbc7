// Fibers, one a thread of the device: their stacks, the switch, and the places where they give way to others.
#include <cstring>
#include <stdexcept>

#include "state.h"

Dim3 gridDim, blockIdx, blockDim, threadIdx;

char* shared_memory() { return shim::current->cta->shared; }

namespace shim {

Fiber* current = nullptr;
std::mt19937_64 random_bits;
long progress = 0;

static void* scheduler_stack = nullptr;
static const std::function<void()>* kernel_body = nullptr;
static std::string failure;  // of a fiber

// Saves what the calling convention keeps, and goes on where the other stack left off.
asm(R"(
.text
shim_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
extern "C" void shim_switch(void** saved, void* target) asm("shim_switch");

bool one_in(int odds) { return random_bits() % static_cast<unsigned>(odds) == 0; }

static void give_way(Waits waits) {
    current->waits = waits;
    shim_switch(&current->stack_pointer, scheduler_stack);
}

[[noreturn]] void fail(const std::string& message) {
    if (current == nullptr) throw std::runtime_error(message);
    failure =
        message + " (CTA " + std::to_string(current->cta->index) + ", thread " + std::to_string(current->thread) + ")";
    for (;;) give_way(Waits::kNothing);
}

void maybe_yield(int odds) {
    if (one_in(odds)) give_way(Waits::kNothing);
}

void meet_block() { give_way(Waits::kBlock); }

void meet_named(int barrier, int threads) {
    if (barrier < 0 || barrier >= kNamedBarriers) fail("no such named barrier");
    current->named = barrier;
    current->named_threads = threads;
    give_way(Waits::kNamed);
}

void exchange_in_warp(int kind, uint64_t value, uint64_t (&all)[32]) {
    current->kind = kind;
    current->value = value;
    give_way(Waits::kWarp);
    std::memcpy(all, current->all, sizeof(all));
}

static void enter_fiber() {
    (*kernel_body)();
    if (!current->products.empty()) fail("a thread ends with products in flight");
    if (!current->stores.empty()) fail("a thread ends before its stores have read shared memory");
    current->done = true;
    ++progress;
    for (;;) give_way(Waits::kNothing);
}

void begin_fibers(const std::function<void()>& kernel, int seed) {
    random_bits.seed(static_cast<unsigned>(seed) * 7919 + 13);
    kernel_body = &kernel;
    current = nullptr;
    failure.clear();
}

// The stack looks as shim_switch left it: six registers, where to return to, and one word so that the stack pointer is
// 8 modulo 16 at entry, as the calling convention has it.
void prepare(Fiber& fiber) {
    void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(enter_fiber);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    fiber.stack_pointer = top;
}

void resume(Fiber& fiber) {
    current = &fiber;
    threadIdx = {static_cast<unsigned>(fiber.thread), 0, 0};
    blockIdx = {fiber.cta->index, 0, 0};
    shim_switch(&scheduler_stack, fiber.stack_pointer);
    current = nullptr;
    if (!failure.empty()) throw std::runtime_error(failure);
}

}  // namespace shim
