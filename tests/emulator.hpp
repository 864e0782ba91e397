// CUDA's words in C++, enough to run the device code on a CPU.
//
// The threads of a block are fibers. A warp runs until all its threads wait at the same shuffle or barrier; anything
// else is an error, counted in `divergent`. The next warp to run is always the first that can, or always the last: one
// warp gets as far ahead of the others as barriers allow, so that a missing barrier shows.
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

// A GPU stops at a misaligned access; the sanitizer reports it here.
extern "C" {
int misaligned = 0;
int divergent = 0;
int last_first = 0;
void __ubsan_handle_type_mismatch_v1(void*, void*) { ++misaligned; }
}

namespace emulator {

constexpr int WARP = 32;
constexpr std::size_t STACK_NBYTES = 64 * 1024;

enum State { RUNNING, AT_SHUFFLE, AT_BARRIER, DONE };

// Begins in a context of its own, and is then left and resumed by jumps, which make no system call.
struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK_NBYTES);
    jmp_buf place;
    bool begun = false;
    State state = RUNNING;
    unsigned given[2];   // to this shuffle and to the last, which a slower thread may still read
    int turn = 0;
};

static std::vector<std::unique_ptr<Fiber>> fibers;   // each runs the same thread of one block after the other
static jmp_buf scheduler;
static std::function<void()> body;

static Fiber& current() { return *fibers[threadIdx.x]; }

static void wait(State state) {
    Fiber& fiber = current();
    fiber.state = state;
    if (_setjmp(fiber.place) == 0) _longjmp(scheduler, 1);
}

static void enter() {
    for (;;) {
        body();
        wait(DONE);
    }
}

static std::unique_ptr<Fiber> make_fiber() {
    auto fiber = std::make_unique<Fiber>();
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.data();
    fiber->context.uc_stack.ss_size = fiber->stack.size();
    makecontext(&fiber->context, enter, 0);
    return fiber;
}

static void resume(Fiber& fiber) {
    if (_setjmp(scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

// Run every thread of a warp up to where it waits next; return where that is.
static State advance(int warp) {
    for (int lane = 0; lane < WARP; ++lane) {
        threadIdx.x = warp * WARP + lane;
        current().state = RUNNING;
        resume(current());
    }
    for (int lane = 0; lane < WARP; ++lane) divergent += fibers[warp * WARP + lane]->state != current().state;
    return current().state;
}

static void run_block() {
    const int warps = blockDim.x / WARP;
    while (fibers.size() < blockDim.x) fibers.push_back(make_fiber());
    std::vector<State> states(warps, RUNNING);
    for (;;) {
        int done = 0;
        for (int turn = 0; turn < warps; ++turn) {
            const int warp = last_first ? warps - 1 - turn : turn;
            while (states[warp] == RUNNING || states[warp] == AT_SHUFFLE) states[warp] = advance(warp);
            done += states[warp] == DONE;
        }
        if (done == warps) return;
        if (done != 0) {
            ++divergent;   // the others would wait for ever
            fibers.clear();
            return;
        }
        for (State& state : states) state = RUNNING;
    }
}

template <typename Call>
void launch(unsigned grid, unsigned block, const Call& call) {
    body = call;
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) run_block();
}

// For kernels whose threads never wait for each other.
template <typename Call>
void launch_in_turn(unsigned grid, unsigned block, const Call& call) {
    gridDim.x = grid;
    blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) call();
    }
}

template <typename To, typename From>
To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

static int to_int(double rounded) {   // as the GPU: NaN is 0, the rest is clamped
    if (rounded != rounded) return 0;
    return static_cast<int>(std::fmin(std::fmax(rounded, -2147483648.0), 2147483647.0));
}

// Give a value to the warp and take that of another of its threads.
template <typename T>
T exchange(T value, unsigned source) {
    Fiber& fiber = current();
    const int turn = fiber.turn;
    fiber.turn = 1 - turn;
    fiber.given[turn] = bits_as<unsigned>(value);
    wait(AT_SHUFFLE);
    return bits_as<T>(fibers[source]->given[turn]);
}

// Give a condition to the warp and take those of all its threads, a bit each.
static unsigned vote(bool condition) {
    Fiber& fiber = current();
    const int turn = fiber.turn;
    fiber.turn = 1 - turn;
    fiber.given[turn] = condition;
    wait(AT_SHUFFLE);
    unsigned bits = 0;
    for (int lane = 0; lane < WARP; ++lane) bits |= fibers[threadIdx.x / WARP * WARP + lane]->given[turn] << lane;
    return bits;
}

}   // namespace emulator

template <typename T>
T __shfl_xor_sync(unsigned, T value, int distance) {
    return emulator::exchange(value, threadIdx.x ^ distance);
}

template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
    const bool inside = static_cast<int>(threadIdx.x % emulator::WARP) >= distance;
    return emulator::exchange(value, inside ? threadIdx.x - distance : threadIdx.x);
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
    return emulator::exchange(value, threadIdx.x / emulator::WARP * emulator::WARP + lane);
}

static inline unsigned __ballot_sync(unsigned, bool condition) { return emulator::vote(condition); }

static inline void __syncthreads() { emulator::wait(emulator::AT_BARRIER); }

static inline unsigned atomicAdd(unsigned* address, unsigned value) {   // one thread runs at a time
    const unsigned old = *address;
    *address += value;
    return old;
}

template <typename T>
T __ldcs(const T* address) {
    return *address;
}

template <typename T>
T min(T a, T b) {
    return a < b ? a : b;
}

template <typename T>
T max(T a, T b) {
    return a > b ? a : b;
}

static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline int __ffs(int bits) { return __builtin_ffs(bits); }
static inline float __uint_as_float(unsigned bits) { return emulator::bits_as<float>(bits); }
static inline unsigned __float_as_uint(float value) { return emulator::bits_as<unsigned>(value); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline int __float2int_rn(float a) { return emulator::to_int(std::nearbyint(a)); }
static inline int __float2int_rd(float a) { return emulator::to_int(std::floor(a)); }

static inline float half_to_float(unsigned short bits) { return emulator::bits_as<_Float16>(bits); }
static inline unsigned short float_to_half(float value) {
    return emulator::bits_as<unsigned short>(static_cast<_Float16>(value));
}
static inline unsigned short float_to_bfloat16(float value) {
    const unsigned bits = __float_as_uint(value);
    if (value != value) return 0x7FFF;
    return static_cast<unsigned short>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);   // ties to even
}
