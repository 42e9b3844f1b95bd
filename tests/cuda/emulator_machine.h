// What the parts of the emulator share: the threads of one cluster of blocks as fibers, and who runs.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "emulator.h"

namespace mlora::cuda {

constexpr int kLanes = 32;
constexpr int kWarpgroup = 128;
constexpr int kMostThreads = 2048;
constexpr int kMostCluster = 8;

enum class State { kReady, kAtBarrier, kMeeting, kAtPhase, kDone };

struct Copy {
  void* shared;
  const void* global;
  int size;
  int present;  // bytes of `size`; the others become zeros
  int group;
};

struct Fiber {
  void* stack;
  State state;
  int copy_group;
  std::vector<Copy> copies;
  const void* waits_for;  // at kAtPhase
  int calls;              // of the operation that a test breaks
};

// Threads that meet at one operation: a warp's or a warpgroup's.
struct Meeting {
  WarpWork work;
  void* operands[kWarpgroup];
  int arrived;
};

struct Machine {
  Fiber fibers[kMostThreads];  // block after block
  Meeting warps[kMostThreads / kLanes];
  Meeting warpgroups[kMostThreads / kWarpgroup];
  void* scheduler;
  unsigned char* stacks = nullptr;
  std::vector<unsigned char> shared;
  unsigned char* first_shared;
  unsigned char* shared_begin;  // of the block whose thread runs
  size_t shared_stride;
  size_t shared_bytes;
  std::mt19937 random{1};
  const char* name;  // of the launch
  int threads;       // of a block
  int cluster;
  int current;  // in the cluster
  int rank;     // in the cluster, of the current one's block
  int done;
  int at_barrier[kMostCluster + 1];  // of each block, and of the cluster
  int block[3];
  Grid grid;
  void (*run)(const void*);
  const void* call;
  bool stopped;  // by a fault that a test has made
};

extern Machine machine;

// Says what is wrong: the process ends, or only the launch where a test has broken an operation.
void report(const char* message);
// As a thread, which does not go on.
[[noreturn]] void die(const char* message);

// Lets others run; a thread that is not kReady goes on once somebody has set it so.
void leave(State state);

// Until `count` threads meet; the last one to arrive runs `work` on the operands of all.
void meet_at(Meeting& meeting, int count, WarpWork work, void* operands);

void wait_at_barrier(int which, int count);

// Whether a test has asked to leave this call out.
bool is_broken(const char* operation);

// The thread has copied something into shared memory that boxes and products do not see yet.
void hide_copy(const void* shared, int bytes);

// Boxes that a thread has sent away and boxes on their way: emulator_hopper.cpp.
void begin_boxes();
bool move_a_box();             // false: none is on its way
void check_boxes_of_thread();  // when it ends
void check_boxes();            // when the cluster ends

}  // namespace mlora::cuda
