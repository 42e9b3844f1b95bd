#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <sstream>
#include <unordered_set>

#include "emulator_machine.h"

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

Machine machine;

namespace {

constexpr size_t kStackBytes = 65536 + 1088;  // stacks that begin at different places of the caches

std::mutex mutex;

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
  int64_t products[kMostThreads / kLanes] = {};  // of each warp of the blocks that run
  int64_t busiest = 0;                           // those of each block's busiest warp
  std::string log;
};

Watch watch;
bool launches_do_nothing = false;
int shared_limit = 227 * 1024;
std::string failing;
int multiprocessor_count = 132;
bool hopper = true;

// The operation that a test leaves out in launches of a name, of threads [first, end) of a block: each call,
// or only one of each thread.
struct Break {
  std::string operation;
  std::string launch;  // empty: in all
  int first = 0;
  int end = 0;
  int call = -1;
  std::string found;
};

Break broken;

void fiber_main() {
  machine.run(machine.call);
  check_boxes_of_thread();
  ++machine.done;
  leave(State::kDone);
  std::abort();
}

void start_fibers() {
  for (int i = 0; i < machine.threads * machine.cluster; ++i) {
    Fiber& fiber = machine.fibers[i];
    fiber.state = State::kReady;
    fiber.copy_group = 0;
    fiber.copies.clear();
    fiber.calls = 0;
    void** top = reinterpret_cast<void**>(machine.stacks + (static_cast<size_t>(i) + 1) * kStackBytes) - 2;
    *top = reinterpret_cast<void*>(&fiber_main);  // where the first switch returns to
    fiber.stack = top - 6;
  }
  for (Meeting& meeting : machine.warps) {
    meeting.arrived = 0;
  }
  for (Meeting& meeting : machine.warpgroups) {
    meeting.arrived = 0;
  }
  machine.done = 0;
  std::fill(std::begin(machine.at_barrier), std::end(machine.at_barrier), 0);
  machine.stopped = false;
}

void run_thread(int index) {
  machine.current = index;
  machine.rank = index / machine.threads;
  machine.shared_begin = machine.first_shared + static_cast<size_t>(machine.rank) * machine.shared_stride;
  mlora_switch_stack(&machine.scheduler, machine.fibers[index].stack);
}

// Runs each thread in turn until it waits; the order of the turns is new each time. Boxes arrive in between.
// Of a cluster one block stands still for a while, until others wait for it at the latest.
void run_cluster() {
  start_fibers();
  begin_boxes();
  const int threads = machine.threads * machine.cluster;
  int padded = kLanes;
  while (padded < threads) {
    padded *= 2;
  }
  int still = -1;
  while (machine.done < threads && !machine.stopped) {
    if (machine.cluster > 1 && machine.random() % 8 == 0) {
      still = static_cast<int>(machine.random() % static_cast<unsigned>(machine.cluster));
    }
    const unsigned start = machine.random(), stride = machine.random() | 1u;
    bool progress = false;
    for (int turn = 0; turn < padded && !machine.stopped; ++turn) {
      const int thread =
          static_cast<int>((start + static_cast<unsigned>(turn) * stride) % static_cast<unsigned>(padded));
      if (thread < threads && thread / machine.threads != still &&
          machine.fibers[thread].state == State::kReady) {
        progress = true;
        run_thread(thread);
        if (machine.random() % 64 == 0) {
          move_a_box();
        }
      }
    }
    if (!progress && still < 0 && !move_a_box()) {
      report("threads wait for others that never come");
    }
    still = progress ? still : -1;
  }
  if (!machine.stopped) {
    check_boxes();
  }
}

}  // namespace

void report(const char* message) {
  std::ostringstream line;
  line << message << " (block " << machine.block[0] + machine.rank << ' ' << machine.block[1] << ' '
       << machine.block[2] << ", thread " << thread_index() << ')';
  if (broken.operation.empty()) {
    std::fprintf(stderr, "emulator: %s\n", line.str().c_str());
    std::abort();
  }
  broken.found = line.str();
  machine.stopped = true;
}

void die(const char* message) {
  report(message);
  leave(State::kDone);
  std::abort();
}

void leave(State state) {
  Fiber& fiber = machine.fibers[machine.current];
  fiber.state = state;
  mlora_switch_stack(&fiber.stack, machine.scheduler);
}

bool is_broken(const char* operation) {
  if (broken.operation.empty() || broken.operation != operation || thread_index() < broken.first ||
      thread_index() >= broken.end || (!broken.launch.empty() && broken.launch != machine.name)) {
    return false;
  }
  return machine.fibers[machine.current].calls++ == broken.call || broken.call < 0;
}

int thread_index() { return machine.current - machine.rank * machine.threads; }
int block_x() { return machine.block[0] + machine.rank; }
int block_y() { return machine.block[1]; }
int block_z() { return machine.block[2]; }
int grid_x() { return static_cast<int>(machine.grid.x); }
int grid_y() { return static_cast<int>(machine.grid.y); }
int cluster_rank() { return machine.rank; }
unsigned char* shared_memory() { return machine.shared_begin; }

void wait_at_barrier(int which, int count) {
  if (++machine.at_barrier[which] < count) {
    leave(State::kAtBarrier);
    return;
  }
  machine.at_barrier[which] = 0;
  const int first = which < kMostCluster ? which * machine.threads : 0;
  for (int i = first; i < first + count; ++i) {
    machine.fibers[i].state = State::kReady;
  }
  leave(State::kReady);
}

void synchronize() {
  if (!is_broken("synchronize")) {
    wait_at_barrier(machine.rank, machine.threads);
  }
}

void meet_at(Meeting& meeting, int count, WarpWork work, void* operands) {
  const int place = machine.current % count;
  if (meeting.arrived > 0 && meeting.work != work) {
    die("lanes of a warp meet at different operations");
  }
  meeting.work = work;
  meeting.operands[place] = operands;
  if (++meeting.arrived < count) {
    leave(State::kMeeting);
    return;
  }
  meeting.arrived = 0;
  work(meeting.operands);
  for (int i = 0; i < count; ++i) {
    machine.fibers[machine.current - place + i].state = State::kReady;
  }
}

void meet(WarpWork work, void* operands) {
  meet_at(machine.warps[machine.current / kLanes], kLanes, work, operands);
}

int most_shared_bytes(const Queue&) { return shared_limit; }
int multiprocessors(const Queue&) { return multiprocessor_count; }
bool is_hopper(const Queue&) { return hopper; }

uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(shared) - machine.shared_begin);
}

namespace {

void start_copy(void* shared, const void* global, int size, int present) {
  const auto at = [&](const void* place) {
    return reinterpret_cast<uintptr_t>(place) % static_cast<unsigned>(size);
  };
  if (at(shared) != 0 || (present > 0 && at(global) != 0)) {
    die("a copy is misaligned");
  }
  Fiber& fiber = machine.fibers[machine.current];
  count_read(global, present);
  std::memset(shared, 0xff, static_cast<size_t>(size));
  fiber.copies.push_back({shared, global, size, present, fiber.copy_group});
}

}  // namespace

void copy_async(void* shared, const void* global, bool present) {
  start_copy(shared, global, 16, present ? 16 : 0);
}

void copy_word_async(uint32_t to, const void* global, int bytes) {
  start_copy(machine.shared_begin + to, global, 4, bytes);
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

void count_products(int count) {
  if (machine.current % kLanes == 0) {
    watch.products[machine.current / kLanes] += count;
  }
}

void commit_copies() { ++machine.fibers[machine.current].copy_group; }

void wait_for_copies(int pending) {
  if (is_broken("wait_copies")) {
    return;
  }
  Fiber& fiber = machine.fibers[machine.current];
  size_t finished = 0;
  while (finished < fiber.copies.size() && fiber.copies[finished].group < fiber.copy_group - pending) {
    const Copy& copy = fiber.copies[finished++];
    std::memset(copy.shared, 0, static_cast<size_t>(copy.size));
    std::memcpy(copy.shared, copy.global, static_cast<size_t>(copy.present));
    hide_copy(copy.shared, copy.size);
  }
  fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + static_cast<ptrdiff_t>(finished));
}

void synchronize_warp() {
  if (is_broken("synchronize_warp")) {
    return;
  }
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
    std::fprintf(stderr, "emulator: a block asks for too much shared memory\n");
    std::abort();
  }
  const std::lock_guard lock(mutex);
  watch.reads = watch.writes = {};
  watch.busiest = 0;
  if (machine.stacks == nullptr) {
    machine.stacks =
        static_cast<unsigned char*>(mmap(nullptr, kMostThreads * kStackBytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  machine.name = name;
  machine.threads = threads;
  machine.cluster = grid.cluster;
  machine.run = run;
  machine.call = call;
  machine.grid = grid;
  constexpr size_t kAlignment = 1024;
  machine.shared_bytes = static_cast<size_t>(shared_bytes);
  machine.shared_stride = (machine.shared_bytes + kAlignment - 1) / kAlignment * kAlignment;
  const size_t bytes = machine.shared_stride * static_cast<size_t>(grid.cluster);
  machine.shared.resize(bytes + kAlignment);
  machine.first_shared =
      machine.shared.data() + kAlignment - reinterpret_cast<uintptr_t>(machine.shared.data()) % kAlignment;
  const int64_t clusters = grid.x / grid.cluster;
  std::vector<int64_t> order(static_cast<size_t>(clusters * grid.y * grid.z));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::shuffle(order.begin(), order.end(), machine.random);
  const bool fails = failing == name;
  if (fails) {
    failing.clear();
    order.resize(order.size() / 2);
  }
  for (const int64_t index : order) {
    machine.block[0] = static_cast<int>(index % clusters) * grid.cluster;
    machine.block[1] = static_cast<int>(index / clusters % grid.y);
    machine.block[2] = static_cast<int>(index / clusters / grid.y);
    machine.rank = machine.current = 0;
    std::memset(machine.first_shared, 0xff, bytes);
    std::fill(std::begin(watch.products), std::end(watch.products), 0);
    run_cluster();
    watch.busiest += *std::max_element(std::begin(watch.products), std::end(watch.products));
    if (machine.stopped) {
      return 719;
    }
  }
  if (watch.on) {
    std::ostringstream line;
    line << name << ' ' << order.size() * static_cast<size_t>(grid.cluster) << ' ' << watch.reads.bytes << ' '
         << 32 * watch.reads.sectors.size() << ' ' << watch.writes.bytes << ' '
         << 32 * watch.writes.sectors.size() << ' ' << watch.busiest << '\n';
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

// Whether the device is an sm_90 from now on.
extern "C" __attribute__((visibility("default"))) void mlora_emulator_hopper(bool is) {
  mlora::cuda::hopper = is;
}

// The next launch of this name ends with an error after half of its programs.
extern "C" __attribute__((visibility("default"))) void mlora_emulator_fail(const char* name) {
  mlora::cuda::failing = name;
}

// Leaves an operation out from now on, in threads [first, end) of a block: each call, or with `call` at least
// 0 only that one of each thread; with a launch's name only there. A launch in which that is noticed ends
// with an error. An empty name mends all.
extern "C" __attribute__((visibility("default"))) void mlora_emulator_break(const char* operation,
                                                                            const char* launch, int first,
                                                                            int end, int call) {
  mlora::cuda::broken = {operation, launch, first, end, call, ""};
}

// What was noticed; empty: nothing.
extern "C" __attribute__((visibility("default"))) const char* mlora_emulator_found() {
  return mlora::cuda::broken.found.c_str();
}

// Whether launches are left out from now on, for measurements of the host's part.
extern "C" __attribute__((visibility("default"))) void mlora_emulator_skip(bool skip) {
  mlora::cuda::launches_do_nothing = skip;
}

// A line of each launch: name, programs, bytes read, bytes of the sectors read, the same of what was
// written, and matrix instructions of each program's busiest warp.
extern "C" __attribute__((visibility("default"))) const char* mlora_emulator_log() {
  return mlora::cuda::watch.log.c_str();
}
