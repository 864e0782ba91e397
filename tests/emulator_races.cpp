// SPDX-License-Identifier: Apache-2.0
// Watches every access of emulated device code: GCC's -fsanitize=thread calls what is defined here before each of them,
// and libtsan is not linked.
//
// Two accesses to one byte, of which one is a write, race unless they are of one thread, both atomic, of one block with
// a __syncthreads between, or of one warp with a __syncwarp between. A shuffle orders no memory, and nothing orders
// the blocks of a launch. Which thread ran first here is of no consequence.
//
// A byte remembers who has read it, who has written it, and who has changed it atomically, each since the last
// barrier: the thread, or that there were several.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <tuple>
#include <vector>

struct Index {
    unsigned x;
};

struct Variable {
    char* begin;
    std::size_t nbytes;
};

#define HIDDEN extern __attribute__((visibility("hidden")))   // of the linker's making

extern "C" {
extern Index threadIdx;
extern unsigned epoch, launch_epoch, block_epoch, warp_epoch[32];
extern Variable shared[];
extern int shared_count;
extern bool running;
extern char *fibers_begin, *fibers_end, *stack_end;
[[noreturn]] void emulator_give_up();
HIDDEN char __start_emulator[], __stop_emulator[];
HIDDEN char __ehdr_start[];   // of this library
}

namespace {

constexpr std::uint8_t SEVERAL = 255;
constexpr std::uintptr_t STACK_NBYTES = 1 << 20;   // of the thread that launches

// Those that have accessed a byte in one way. Epochs of earlier launches mean nobody.
struct Those {
    std::uint32_t epoch;        // of the last
    std::uint16_t warp_epoch;   // of the last
    std::uint8_t warp;          // SEVERAL: of this epoch there are some of more than one warp
    std::uint8_t lane;          // SEVERAL: of this epoch and this warp_epoch there are some of more than one lane
    std::uint32_t at : 31;      // the instruction of the last
    std::uint32_t elsewhere : 1;   // there are some of another block
};

struct Byte {
    Those readers, writers, adders;
};

struct Range {
    std::uintptr_t begin, end;
    std::size_t first;   // of its bytes
    bool shared;
};

std::vector<Range> ranges;
std::vector<Byte> bytes;
Range last{};
std::map<std::tuple<const char*, std::uint32_t, std::uint32_t>, long> found;   // what, where, and where the other was

enum Kind { READ, WRITE, ADD };

bool holds(const char* begin, const char* end, std::uintptr_t address) {
    return address >= reinterpret_cast<std::uintptr_t>(begin) && address < reinterpret_cast<std::uintptr_t>(end);
}

// Whether there is no order between the thread that runs and those.
bool race(const Those& those, bool shared) {
    if (those.epoch < launch_epoch) return false;
    if (those.epoch < block_epoch) return !shared;
    if (those.elsewhere && !shared) return true;
    if (those.epoch != epoch) return false;
    const unsigned warp = threadIdx.x / 32;
    if (those.warp != warp) return true;
    return those.warp_epoch == static_cast<std::uint16_t>(warp_epoch[warp]) && those.lane != threadIdx.x % 32;
}

void join(Those& those, std::uint32_t at) {
    const std::uint8_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const std::uint16_t now = warp_epoch[warp];
    const bool known = those.epoch >= launch_epoch;
    const bool elsewhere = known && (those.elsewhere || those.epoch < block_epoch);
    if (those.epoch != epoch) {
        those = {epoch, now, warp, lane, at, elsewhere};
        return;
    }
    if (those.warp != warp) {
        those.warp = SEVERAL;
    } else if (those.warp_epoch != now) {
        those.warp_epoch = now;
        those.lane = lane;
    } else if (those.lane != lane) {
        those.lane = SEVERAL;
    }
    those.at = at;
}

void judge(const char* what, const Those& those, const Range& range, std::uint32_t at) {
    if (race(those, range.shared)) ++found[{what, at, those.at}];
}

bool find(std::uintptr_t address) {
    auto after = std::upper_bound(ranges.begin(), ranges.end(), address,
                                  [](std::uintptr_t value, const Range& range) { return value < range.begin; });
    if (after == ranges.begin() || address >= (--after)->end) return false;
    last = *after;
    return true;
}

void touch(const void* pointer, std::size_t nbytes, Kind kind, const void* instruction) {
    if (!running) return;
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    const auto at = static_cast<std::uint32_t>(static_cast<const char*>(instruction) - __ehdr_start);
    if (address < last.begin || address >= last.end) {
        if (holds(fibers_begin, fibers_end, address) || holds(__start_emulator, __stop_emulator, address) ||
            holds(stack_end - STACK_NBYTES, stack_end, address)) {
            return;
        }
        if (!find(address)) last = {};
    }
    if (address + nbytes > last.end) {
        ++found[{kind == READ ? "read out of bounds" : "write out of bounds", at, 0}];
        emulator_give_up();
    }
    for (std::size_t i = 0; i < nbytes; ++i) {
        Byte& byte = bytes[last.first + (address - last.begin) + i];
        if (kind != WRITE && last.shared && std::max(byte.writers.epoch, byte.adders.epoch) < block_epoch) {
            ++found[{"shared memory read that the block has not written", at, 0}];
        }
        judge(kind == READ ? "read after a write" : "write after a write", byte.writers, last, at);
        if (kind != ADD) judge(kind == READ ? "read after an atomic add" : "write after an atomic add", byte.adders, last, at);
        if (kind != READ) judge("write after a read", byte.readers, last, at);
        join(kind == READ ? byte.readers : kind == WRITE ? byte.writers : byte.adders, at);
    }
}

}   // namespace

extern "C" {

// All memory that kernels may access beside shared memory: `count` pairs of begin and end.
void races_memory(const std::uintptr_t* pairs, int count) {
    std::size_t first = 0;
    ranges.clear();
    const auto add = [&](std::uintptr_t begin, std::size_t nbytes, bool of_block) {
        ranges.push_back({begin, begin + nbytes, first, of_block});
        first += nbytes;
    };
    for (int i = 0; i < count; ++i) add(pairs[2 * i], pairs[2 * i + 1] - pairs[2 * i], false);
    for (int i = 0; i < shared_count; ++i) {
        add(reinterpret_cast<std::uintptr_t>(shared[i].begin), shared[i].nbytes, true);
    }
    std::sort(ranges.begin(), ranges.end(), [](const Range& one, const Range& other) { return one.begin < other.begin; });
    if (bytes.size() < first) bytes.resize(first);   // what they remember is of earlier launches
    last = {};
}

// Write a line for each thing found, "what|where|where the other was", and forget it; return how many there were.
int races_found(char* lines, int capacity) {
    const int count = static_cast<int>(found.size());
    int length = 0;
    for (const auto& [key, times] : found) {
        const auto& [what, at, other] = key;
        if (length < capacity) length += std::snprintf(lines + length, capacity - length, "%s|%x|%x\n", what, at, other);
    }
    found.clear();
    return count;
}

#define HERE __builtin_return_address(0)
#define ACCESSES(N)                                                                                  \
    void __tsan_read##N(void* address) { touch(address, N, READ, HERE); }                           \
    void __tsan_write##N(void* address) { touch(address, N, WRITE, HERE); }                         \
    void __tsan_unaligned_read##N(void* address) { touch(address, N, READ, HERE); }                 \
    void __tsan_unaligned_write##N(void* address) { touch(address, N, WRITE, HERE); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void* address, unsigned long nbytes) { touch(address, nbytes, READ, HERE); }
void __tsan_write_range(void* address, unsigned long nbytes) { touch(address, nbytes, WRITE, HERE); }
unsigned __tsan_atomic32_fetch_add(unsigned* address, unsigned value, int) {
    touch(address, 4, ADD, HERE);
    const unsigned old = *address;
    *address += value;
    return old;
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
