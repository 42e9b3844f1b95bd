#include "emulator.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <unordered_set>
#include <vector>

#if !defined(__x86_64__) || !defined(__linux__)
#error "the emulator switches stacks in x86-64 assembly, on Linux"
#endif

// Keeps what a call must keep, stores the stack pointer in *from and goes on at `to`.
extern "C" void mlora_switch_stack(void** from, void* to);
asm(R"(
.text
.globl mlora_switch_stack
.type mlora_switch_stack, @function
mlora_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size mlora_switch_stack, .-mlora_switch_stack
)");

namespace mlora::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kMostThreads = 1024;
constexpr size_t kStackBytes = 65536 + 1088;  // stacks that begin at different places of the caches

enum class State { kReady, kAtBarrier, kInWarp, kDone };

struct Copy {
  void* shared;
  const void* global;
  int bytes;
  int group;
};

struct Fiber {
  void* stack;
  State state;
  int copy_group;
  std::vector<Copy> copies;
};

struct Warp {
  WarpWork work;
  void* operands[kLanes];
  int arrived;
};

struct Machine {
  Fiber fibers[kMostThreads];
  Warp warps[kMostThreads / kLanes];
  void* scheduler;
  unsigned char* stacks = nullptr;
  std::vector<unsigned char> shared;
  unsigned char* shared_begin;
  std::mt19937 random{1};
  std::mutex mutex;
  int threads;
  int current;
  int done;
  int at_barrier;
  int block[3];
  int grid_y;
  void (*run)(const void*);
  const void* call;
};

Machine machine;

// Accesses to global memory: all bytes, and the sectors of 32 bytes that they touch.
struct Accesses {
  int64_t bytes = 0;
  std::unordered_set<uintptr_t> sectors;

  void add(const void* place, int count) {
    bytes += count;
    const uintptr_t first = reinterpret_cast<uintptr_t>(place);
    for (uintptr_t sector = first / 32;
         count > 0 && sector <= (first + static_cast<uintptr_t>(count) - 1) / 32; ++sector) {
      sectors.insert(sector);
    }
  }
};

// What launches did since `mlora_emulator_watch`: a line of each.
struct Watch {
  bool on = false;
  Accesses reads;
  Accesses writes;
  std::string log;
};

Watch watch;
bool launches_do_nothing = false;
int shared_limit = 227 * 1024;
std::string failing;
int multiprocessor_count = 132;

[[noreturn]] void die(const char* message) {
  std::fprintf(stderr, "emulator: %s (block %d %d %d, thread %d)\n", message, machine.block[0],
               machine.block[1], machine.block[2], machine.current);
  std::abort();
}

void leave(State state) {
  Fiber& fiber = machine.fibers[machine.current];
  fiber.state = state;
  mlora_switch_stack(&fiber.stack, machine.scheduler);
}

void fiber_main() {
  machine.run(machine.call);
  ++machine.done;
  leave(State::kDone);
  die("a thread that has ended goes on");
}

void start_fibers() {
  for (int i = 0; i < machine.threads; ++i) {
    Fiber& fiber = machine.fibers[i];
    fiber.state = State::kReady;
    fiber.copy_group = 0;
    fiber.copies.clear();
    void** top = reinterpret_cast<void**>(machine.stacks + (static_cast<size_t>(i) + 1) * kStackBytes) - 2;
    *top = reinterpret_cast<void*>(&fiber_main);  // where the first switch returns to
    fiber.stack = top - 6;
  }
  for (Warp& warp : machine.warps) {
    warp.arrived = 0;
  }
  machine.done = machine.at_barrier = 0;
}

// Runs each thread in turn until it waits; the order of the turns is new each time.
void run_block() {
  start_fibers();
  int padded = kLanes;
  while (padded < machine.threads) {
    padded *= 2;
  }
  while (machine.done < machine.threads) {
    const unsigned start = machine.random(), stride = machine.random() | 1u;
    bool progress = false;
    for (int turn = 0; turn < padded; ++turn) {
      const int thread =
          static_cast<int>((start + static_cast<unsigned>(turn) * stride) % static_cast<unsigned>(padded));
      if (thread < machine.threads && machine.fibers[thread].state == State::kReady) {
        machine.current = thread;
        progress = true;
        mlora_switch_stack(&machine.scheduler, machine.fibers[thread].stack);
      }
    }
    if (!progress) {
      die("threads wait for others that never come");
    }
  }
}

}  // namespace

int thread_index() { return machine.current; }
int block_x() { return machine.block[0]; }
int block_y() { return machine.block[1]; }
int block_z() { return machine.block[2]; }
int grid_y() { return machine.grid_y; }
unsigned char* shared_memory() { return machine.shared_begin; }

void synchronize() {
  if (++machine.at_barrier < machine.threads) {
    leave(State::kAtBarrier);
    return;
  }
  machine.at_barrier = 0;
  for (int i = 0; i < machine.threads; ++i) {
    machine.fibers[i].state = State::kReady;
  }
  leave(State::kReady);
}

void meet(WarpWork work, void* operands) {
  const int lane = machine.current % kLanes;
  Warp& warp = machine.warps[machine.current / kLanes];
  if (warp.arrived > 0 && warp.work != work) {
    die("lanes of a warp meet at different operations");
  }
  warp.work = work;
  warp.operands[lane] = operands;
  if (++warp.arrived < kLanes) {
    leave(State::kInWarp);
    return;
  }
  warp.arrived = 0;
  work(warp.operands);
  for (int i = 0; i < kLanes; ++i) {
    machine.fibers[machine.current - lane + i].state = State::kReady;
  }
}

int most_shared_bytes(const Queue&) { return shared_limit; }
int multiprocessors(const Queue&) { return multiprocessor_count; }

uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(shared) - machine.shared_begin);
}

void copy_async(void* shared, const void* global, bool present) {
  const int bytes = present ? 16 : 0;
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 ||
      (present && reinterpret_cast<uintptr_t>(global) % 16 != 0)) {
    die("a copy of 16 bytes is misaligned");
  }
  Fiber& fiber = machine.fibers[machine.current];
  count_read(global, bytes);
  std::memset(shared, 0xff, 16);
  fiber.copies.push_back({shared, global, bytes, fiber.copy_group});
}

void count_read(const void* place, int bytes) {
  if (watch.on) {
    watch.reads.add(place, bytes);
  }
}

void count_write(const void* place, int bytes) {
  if (watch.on) {
    watch.writes.add(place, bytes);
  }
}

void commit_copies() { ++machine.fibers[machine.current].copy_group; }

void wait_for_copies(int pending) {
  Fiber& fiber = machine.fibers[machine.current];
  size_t finished = 0;
  while (finished < fiber.copies.size() && fiber.copies[finished].group < fiber.copy_group - pending) {
    const Copy& copy = fiber.copies[finished++];
    std::memset(copy.shared, 0, 16);
    std::memcpy(copy.shared, copy.global, static_cast<size_t>(copy.bytes));
  }
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + static_cast<ptrdiff_t>(finished));
}

void synchronize_warp() {
  meet([](void* const*) {}, nullptr);
}

uint32_t exchange(uint32_t value, int bit) {
  struct Lanes {
    uint32_t value, received;
    int bit;
  } own{value, 0, bit};
  meet(
      [](void* const* operands) {
        for (int lane = 0; lane < kLanes; ++lane) {
          Lanes& lanes = *static_cast<Lanes*>(operands[lane]);
          lanes.received = static_cast<Lanes*>(operands[lane ^ lanes.bit])->value;
        }
      },
      &own);
  return own.received;
}

namespace {

void load_all(void* const* operands, bool transpose) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      const auto number = [&](int row, int column) {
        const void* from = static_cast<MatrixLanes*>(operands[8 * matrix + row])->row;
        if (reinterpret_cast<uintptr_t>(from) % 16 != 0) {
          die("a row of a matrix is misaligned");
        }
        return uint32_t{static_cast<const uint16_t*>(from)[column]};
      };
      const int row = lane / 4, column = lane % 4 * 2;
      static_cast<MatrixLanes*>(operands[lane])->out[matrix] =
          transpose ? number(column, row) | number(column + 1, row) << 16
                    : number(row, column) | number(row, column + 1) << 16;
    }
  }
}

}  // namespace

void load_matrices_work(void* const* operands) { load_all(operands, false); }
void load_transposed_matrices_work(void* const* operands) { load_all(operands, true); }

int run_grid(const char* name, const Grid& grid, int threads, int shared_bytes, void (*run)(const void*),
             const void* call) {
  if (launches_do_nothing) {
    return 0;
  }
  if (shared_bytes > shared_limit) {
    die("a block asks for too much shared memory");
  }
  const std::lock_guard lock(machine.mutex);
  watch.reads = watch.writes = {};
  if (machine.stacks == nullptr) {
    machine.stacks =
        static_cast<unsigned char*>(mmap(nullptr, kMostThreads * kStackBytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  machine.threads = threads;
  machine.run = run;
  machine.call = call;
  machine.grid_y = static_cast<int>(grid.y);
  constexpr size_t kAlignment = 1024;
  machine.shared.resize(static_cast<size_t>(shared_bytes) + kAlignment);
  machine.shared_begin =
      machine.shared.data() + kAlignment - reinterpret_cast<uintptr_t>(machine.shared.data()) % kAlignment;
  std::vector<int64_t> order(static_cast<size_t>(grid.x * grid.y * grid.z));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::shuffle(order.begin(), order.end(), machine.random);
  const bool fails = failing == name;
  if (fails) {
    failing.clear();
    order.resize(order.size() / 2);
  }
  for (const int64_t index : order) {
    machine.block[0] = static_cast<int>(index % grid.x);
    machine.block[1] = static_cast<int>(index / grid.x % grid.y);
    machine.block[2] = static_cast<int>(index / grid.x / grid.y);
    std::memset(machine.shared_begin, 0xff, static_cast<size_t>(shared_bytes));
    run_block();
  }
  if (watch.on) {
    std::ostringstream line;
    line << name << ' ' << order.size() << ' ' << watch.reads.bytes << ' ' << 32 * watch.reads.sectors.size()
         << ' ' << watch.writes.bytes << ' ' << 32 * watch.writes.sectors.size() << '\n';
    watch.log += line.str();
  }
  return fails ? 719 : 0;
}

}  // namespace mlora::cuda

// Begins or ends the watch over launches; it begins with an empty log.
extern "C" __attribute__((visibility("default"))) void mlora_emulator_watch(bool on) {
  mlora::cuda::watch = {};
  mlora::cuda::watch.on = on;
}

// Shared memory that a block may have from now on.
extern "C" __attribute__((visibility("default"))) void mlora_emulator_limit(int bytes) {
  mlora::cuda::shared_limit = bytes;
}

// How many multiprocessors there are from now on.
extern "C" __attribute__((visibility("default"))) void mlora_emulator_multiprocessors(int count) {
  mlora::cuda::multiprocessor_count = count;
}

// The next launch of this name ends with an error after half of its programs.
extern "C" __attribute__((visibility("default"))) void mlora_emulator_fail(const char* name) {
  mlora::cuda::failing = name;
}

// Whether launches are left out from now on, for measurements of the host's part.
extern "C" __attribute__((visibility("default"))) void mlora_emulator_skip(bool skip) {
  mlora::cuda::launches_do_nothing = skip;
}

// A line of each launch: name, programs, bytes read, bytes of the sectors read, and the same of what was
// written.
extern "C" __attribute__((visibility("default"))) const char* mlora_emulator_log() {
  return mlora::cuda::watch.log.c_str();
}
