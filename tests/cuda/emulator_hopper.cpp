#include "emulator_hopper.h"

#include <algorithm>
#include <cstddef>
#include <map>

#include "cuda/hopper_product.h"
#include "emulator_machine.h"

namespace mlora::cuda {
namespace {

struct Phases {
  int count = 0;
  int left = 0;
  int64_t bytes = 0;
  int phase = 0;
  bool shown = false;
};

// On its way to, or from, shared memory of block `rank`.
struct Box {
  TensorMap map;
  int rank;
  uint32_t shared;
  int column;
  int row;
  Phases* barrier;
  int thread;                    // that sent it away; -1: it comes
  int number;                    // of those that the thread has sent
  bool add;                      // to what is there
  std::vector<uint32_t> hidden;  // words that their writers had not shown
};

// Two numbers on their way to a block of the cluster.
struct Pair {
  unsigned char* to;
  float numbers[2];
  Phases* barrier;
};

struct Product {
  Scalar type;
  float* sum;
  int count;
  bool a_across;
  bool b_across;
  uint64_t a;
  uint64_t b;
  bool add;

  bool same(const Product& other) const {
    return type == other.type && count == other.count && a_across == other.a_across &&
           b_across == other.b_across && a == other.a && b == other.b && add == other.add;
  }
};

// Products of one thread, as it asked for them; groups but the last are committed.
struct Products {
  bool begun = false;
  std::vector<std::vector<Product>> groups{1};
  std::map<float*, std::vector<float>> sums;  // as they are, while the thread's own are NaN
};

struct Engine {
  std::map<std::pair<int, uint32_t>, Phases> barriers;
  std::vector<Box> boxes;
  std::vector<Pair> pairs;
  std::vector<int> hidden_by[kMostCluster];  // of each word of shared memory: the thread plus one
  std::vector<uint32_t> hides[kMostThreads];
  int sent[kMostThreads];
  Products products[kMostThreads];
};

Engine engine;

unsigned char* shared_of(int rank) {
  return machine.first_shared + static_cast<size_t>(rank) * machine.shared_stride;
}

Fiber& own_fiber() { return machine.fibers[machine.current]; }

void let_others_run() {
  if (machine.random() % 2 != 0) {
    leave(State::kReady);
  }
}

Phases& barrier_of(int rank, uint32_t barrier) {
  const auto found = engine.barriers.find({rank, barrier});
  if (found == engine.barriers.end() || !found->second.shown) {
    die("a barrier is used that has not begun");
  }
  return found->second;
}

void settle(Phases& barrier) {
  if (barrier.left == 0 && barrier.bytes == 0) {
    barrier.left = barrier.count;
    ++barrier.phase;
    for (int i = 0; i < machine.threads * machine.cluster; ++i) {
      Fiber& fiber = machine.fibers[i];
      if (fiber.state == State::kAtPhase && fiber.waits_for == &barrier) {
        fiber.state = State::kReady;
      }
    }
  }
}

void arrive(Phases& barrier) {
  if (barrier.left <= 0) {
    die("threads arrive too often");
  }
  --barrier.left;
  settle(barrier);
}

// Threads leave after all that may come to their block.
void check_block(int rank) {
  for (int i = rank * machine.threads; i < (rank + 1) * machine.threads; ++i) {
    if (machine.fibers[i].state == State::kDone) {
      die("a box, a pair or an arrival for a block that may have left");
    }
  }
}

// The place of 16 bytes in rows of `width` bytes that are swizzled.
uint32_t swizzled(uint32_t place, int width) {
  return place ^ ((place >> 7 & static_cast<uint32_t>(width / 16 - 1)) << 4);
}

template <typename Function>
void for_each_chunk(const Box& box, Function&& f) {
  const TensorMap& map = box.map;
  const int width = 2 * map.box_columns;
  for (int y = 0; y < map.box_rows; ++y) {
    for (int x = 0; x < map.box_columns; x += 8) {
      const int64_t row = box.row + y, column = box.column + x;
      const int64_t inside = row < 0 || row >= map.rows || column < 0 ? 0 : map.columns - column;
      const uint32_t place = box.shared + static_cast<uint32_t>(y * width + 2 * x);
      f(swizzled(place, width),
        static_cast<size_t>(inside < 0   ? 0
                            : inside < 8 ? inside
                                         : 8) *
            2,
        row * map.stride + column);
    }
  }
}

float widened(Scalar type, uint16_t bits) {
  return type == Scalar::kHalf ? to_float(Half{bits}) : to_float(BFloat16{bits});
}

uint16_t sum_of(Scalar type, uint16_t a, uint16_t b) {
  const float sum = widened(type, a) + widened(type, b);
  Half half;
  BFloat16 brain;
  from_float(sum, half);
  from_float(sum, brain);
  return type == Scalar::kHalf ? half.bits : brain.bits;
}

void move(const Box& box) {
  unsigned char* shared = shared_of(box.rank);
  const auto is_hidden = [&](uint32_t word) {
    return std::find(box.hidden.begin(), box.hidden.end(), word) != box.hidden.end();
  };
  for_each_chunk(box, [&](uint32_t place, size_t bytes, int64_t number) {
    if (box.thread < 0) {
      std::memset(shared + place, 0, 16);
      std::memcpy(shared + place, static_cast<const uint16_t*>(box.map.data) + (bytes > 0 ? number : 0),
                  bytes);
      return;
    }
    unsigned char chunk[16];
    std::memcpy(chunk, shared + place, 16);
    for (uint32_t word = 0; word < 4 && !box.hidden.empty(); ++word) {
      if (is_hidden(place / 4 + word)) {
        std::memset(chunk + 4 * word, 0xff, 4);
      }
    }
    uint16_t* to = const_cast<uint16_t*>(static_cast<const uint16_t*>(box.map.data)) + number;
    for (size_t i = 0; i < bytes / 2; ++i) {
      uint16_t value;
      std::memcpy(&value, chunk + 2 * i, 2);
      to[i] = box.add ? sum_of(box.map.type, to[i], value) : value;
    }
  });
  if (box.thread < 0) {
    box.barrier->bytes -= int64_t{box.map.box_rows} * box.map.box_columns * 2;
    settle(*box.barrier);
  }
}

void move_box(size_t index) {
  const Box box = engine.boxes[index];
  engine.boxes.erase(engine.boxes.begin() + static_cast<std::ptrdiff_t>(index));
  move(box);
}

void move_a_pair() {
  Pair& chosen = engine.pairs[machine.random() % engine.pairs.size()];
  const Pair pair = chosen;
  chosen = engine.pairs.back();
  engine.pairs.pop_back();
  std::memcpy(pair.to, pair.numbers, sizeof(pair.numbers));
  pair.barrier->bytes -= static_cast<int64_t>(sizeof(pair.numbers));
  settle(*pair.barrier);
}

void start_box(const Box& box) {
  const size_t bytes = static_cast<size_t>(box.map.box_rows) * static_cast<size_t>(box.map.box_columns) * 2;
  if (box.shared % 1024 != 0 || box.shared + bytes > machine.shared_bytes) {
    die("a box is misaligned in shared memory, or outside of it");
  }
  for_each_chunk(box, [&](uint32_t, size_t inside, int64_t number) {
    const uint16_t* place = static_cast<const uint16_t*>(box.map.data) + (inside > 0 ? number : 0);
    box.thread < 0 ? count_read(place, static_cast<int>(inside))
                   : count_write(place, static_cast<int>(inside));
  });
  if (box.thread < 0) {
    check_block(box.rank);
    std::memset(shared_of(box.rank) + box.shared, 0xff, bytes);
  }
  engine.boxes.push_back(box);
  let_others_run();
}

// Number (along, k) of the operand that a descriptor gives.
float operand_number(Scalar type, uint64_t descriptor, bool across, int along, int k) {
  const auto field = [&](int bit) { return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4; };
  const uint32_t start = field(0), leading = field(16), group = field(32);
  const uint64_t layout = descriptor >> 62;
  const uint32_t width = layout == 0 ? 0 : 256u >> layout;
  const uint32_t row = static_cast<uint32_t>(across ? k : along);
  const uint32_t place = static_cast<uint32_t>(across ? along : k) * 2;
  if (width == 0 || (across && start % width != 0)) {
    report("a descriptor begins within a swizzled row, or has no swizzle");
    return NAN;
  }
  const uint32_t address =
      start + row / 8 * group + row % 8 * width + (across ? place / width * leading + place % width : place);
  const uint32_t found = swizzled(address, static_cast<int>(width));
  if (engine.hidden_by[machine.rank].at(found / 4) != 0) {
    return NAN;
  }
  uint16_t bits;
  std::memcpy(&bits, machine.shared_begin + found, 2);
  return widened(type, bits);
}

// f(number of the thread's own sums, row, column) in the layout of a Fragment<1, count / 4>
template <typename Function>
void for_each_sum(int thread, int count, Function&& f) {
  const int row = thread / kLanes * 16 + thread % kLanes / 4, column = thread % 4 * 2;
  for (int i = 0; i < count; ++i) {
    f(static_cast<size_t>(i), row + i / 2 % 2 * 8, column + i / 4 * 8 + i % 2);
  }
}

void make_product(Products* const* threads, size_t index) {
  const Product first = threads[0]->groups[0][index];
  const int columns = 2 * first.count;
  static float a[64][16], b[16][256], sum[64][256];
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; row < 64; ++row) {
      a[row][k] = operand_number(first.type, first.a, first.a_across, row, k);
    }
    for (int column = 0; column < columns; ++column) {
      b[k][column] = operand_number(first.type, first.b, first.b_across, column, k);
    }
  }
  for (int thread = 0; thread < kWarpgroup; ++thread) {
    const Product& own = threads[thread]->groups[0][index];
    const std::vector<float>& numbers = threads[thread]->sums[own.sum];
    for_each_sum(thread, first.count,
                 [&](size_t i, int row, int column) { sum[row][column] = own.add ? numbers[i] : 0.0f; });
  }
  for (int row = 0; row < 64; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int block = 0; block < columns; block += 16) {
        for (int column = block; column < block + 16; ++column) {
          sum[row][column] += a[row][k] * b[k][column];
        }
      }
    }
  }
  for (int thread = 0; thread < kWarpgroup; ++thread) {
    const Product& own = threads[thread]->groups[0][index];
    std::vector<float>& numbers = threads[thread]->sums[own.sum];
    for_each_sum(thread, first.count, [&](size_t i, int row, int column) { numbers[i] = sum[row][column]; });
  }
}

struct ProductWait {
  Products* products;
  int pending;
};

// Of a warpgroup: makes the groups that must be done.
void make_products(void* const* operands) {
  Products* threads[kWarpgroup];
  const auto wait_of = [&](int i) { return static_cast<const ProductWait*>(operands[i]); };
  for (int i = 0; i < kWarpgroup; ++i) {
    threads[i] = wait_of(i)->products;
    if (threads[i]->groups.size() != threads[0]->groups.size() ||
        wait_of(i)->pending != wait_of(0)->pending) {
      die("threads of a warpgroup wait for different products");
    }
  }
  while (static_cast<int>(threads[0]->groups.size()) - 1 > wait_of(0)->pending) {
    for (size_t index = 0; index < threads[0]->groups[0].size(); ++index) {
      for (const Products* one : threads) {
        if (one->groups[0].size() != threads[0]->groups[0].size() ||
            !one->groups[0][index].same(threads[0]->groups[0][index])) {
          die("threads of a warpgroup make different products");
        }
      }
      make_product(threads, index);
    }
    for (Products* one : threads) {
      one->groups.erase(one->groups.begin());
    }
  }
}

}  // namespace

void begin_boxes() {
  engine.barriers.clear();
  engine.boxes.clear();
  engine.pairs.clear();
  const size_t words = machine.shared_bytes / 4;
  for (int rank = 0; rank < machine.cluster; ++rank) {
    engine.hidden_by[rank].assign(words, 0);
  }
  for (int i = 0; i < machine.threads * machine.cluster; ++i) {
    engine.hides[i].clear();
    engine.sent[i] = 0;
    engine.products[i] = {};
  }
}

// Or some of the pairs, of which there are many.
bool move_a_box() {
  if (!engine.pairs.empty()) {
    for (unsigned left = 1 + machine.random() % 512; left > 0 && !engine.pairs.empty(); --left) {
      move_a_pair();
    }
    return true;
  }
  if (engine.boxes.empty()) {
    return false;
  }
  move_box(machine.random() % engine.boxes.size());
  return true;
}

void hide_copy(const void* shared, int bytes) {
  if (machine.cluster == 1) {
    return;
  }
  const uint32_t first = shared_address(shared) / 4;
  for (uint32_t word = first; word < first + static_cast<uint32_t>(bytes) / 4; ++word) {
    engine.hidden_by[machine.rank].at(word) = machine.current + 1;
    engine.hides[machine.current].push_back(word);
  }
}

void check_boxes_of_thread() {
  for (const Box& box : engine.boxes) {
    if (box.thread == machine.current) {
      die("a thread leaves while its box is still read");
    }
  }
  if (engine.products[machine.current].groups.size() > 1) {
    die("a thread leaves while its products run");
  }
}

void check_boxes() {
  if (!engine.boxes.empty() || !engine.pairs.empty()) {
    report("boxes or pairs are on their way at the end");
  }
}

int make_map(TensorMap& map, Scalar type, const void* data, int64_t rows, int64_t columns, int64_t stride,
             int box_rows, int box_columns) {
  const bool fits = type != Scalar::kFloat && rows > 0 && columns > 0 && stride >= columns &&
                    stride % 8 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && box_rows <= 256 &&
                    (box_columns == 32 || box_columns == 64);
  map = {type, data, rows, columns, stride, box_rows, box_columns};
  return fits ? 0 : 1;
}

void synchronize_cluster() {
  synchronize_warp();
  if (!is_broken("synchronize_cluster")) {
    wait_at_barrier(kMostCluster, machine.threads * machine.cluster);
  }
}

void barrier_begin(uint32_t barrier, int count) {
  engine.barriers[{machine.rank, barrier}] = {count, count, 0, 0, false};
}

void barriers_have_begun() {
  for (auto& [place, barrier] : engine.barriers) {
    barrier.shown = barrier.shown || (place.first == machine.rank && !is_broken("barriers_have_begun"));
  }
}

void barrier_expect(uint32_t barrier, int bytes) {
  if (is_broken("barrier_expect")) {
    return;
  }
  Phases& own = barrier_of(machine.rank, barrier);
  own.bytes += bytes;
  arrive(own);
}

void barrier_arrive(uint32_t barrier, int rank) {
  if (is_broken("barrier_arrive")) {
    return;
  }
  check_block(rank);
  arrive(barrier_of(rank, barrier));
  let_others_run();
}

void barrier_wait(uint32_t barrier, int parity) {
  const Phases& own = barrier_of(machine.rank, barrier);
  if (is_broken("barrier_wait")) {
    return;
  }
  while ((own.phase & 1) == parity) {
    own_fiber().waits_for = &own;
    leave(State::kAtPhase);
  }
}

void load_box(uint32_t to, const TensorMap* map, int column, int row, uint32_t barrier) {
  start_box({*map, machine.rank, to, column, row, &barrier_of(machine.rank, barrier), -1, 0, false, {}});
}

void load_box_for_both(uint32_t to, const TensorMap* map, int column, int row, uint32_t barrier) {
  for (int rank = 0; rank < 2; ++rank) {
    start_box({*map, rank, to, column, row, &barrier_of(rank, barrier), -1, 0, false, {}});
  }
}

void send_pair(uint32_t to, int rank, float low, float high, uint32_t barrier) {
  check_block(rank);
  if (to % 8 != 0 || to + 8 > machine.shared_bytes) {
    die("a pair is misaligned in shared memory, or outside of it");
  }
  unsigned char* place = shared_of(rank) + to;
  std::memset(place, 0xff, 8);
  engine.pairs.push_back({place, {low, high}, &barrier_of(rank, barrier)});
  if (machine.random() % 16 == 0) {
    leave(State::kReady);
  }
}

void show_to_copies() {
  std::vector<uint32_t>& words = engine.hides[machine.current];
  if (is_broken("show_to_copies")) {
    return;
  }
  for (const uint32_t word : words) {
    int& writer = engine.hidden_by[machine.rank][word];
    writer = writer == machine.current + 1 ? 0 : writer;
  }
  words.clear();
}

void send_box(const TensorMap* map, int column, int row, uint32_t from, bool add) {
  const int number = engine.sent[machine.current]++;
  Box box{*map, machine.rank, from, column, row, nullptr, machine.current, number, add, {}};
  for (uint32_t word = 0; word < static_cast<uint32_t>(map->box_rows * map->box_columns) / 2; ++word) {
    if (engine.hidden_by[machine.rank].at(from / 4 + word) != 0) {
      box.hidden.push_back(from / 4 + word);
    }
  }
  start_box(box);
}

void wait_for_stored_boxes(int pending) {
  if (is_broken(pending == 0 ? "wait_stored_boxes<0>" : "wait_stored_boxes<1>")) {
    return;
  }
  // they may be read in any order; but the latest, all must have been
  for (size_t i = engine.boxes.size(); i-- > 0;) {
    const Box& box = engine.boxes[i];
    if (box.thread == machine.current && box.number < engine.sent[machine.current] - pending) {
      move_box(i);
    }
  }
}

void store_shared(uint32_t to, uint32_t word) {
  std::memcpy(machine.shared_begin + to, &word, 4);
  engine.hidden_by[machine.rank].at(to / 4) = machine.current + 1;
  engine.hides[machine.current].push_back(to / 4);
}

uint32_t load_shared(uint32_t from) {
  uint32_t word;
  std::memcpy(&word, machine.shared_begin + from, 4);
  return word;
}

void begin_products() { engine.products[machine.current].begun = !is_broken("begin_products"); }

void add_product(Scalar type, float* sum, int count, bool a_across, bool b_across, uint64_t a, uint64_t b,
                 bool add) {
  count_products(count / 4);
  Products& own = engine.products[machine.current];
  if (!own.begun) {
    die("a product before begin_products");
  }
  if (own.sums.find(sum) == own.sums.end()) {
    own.sums[sum].assign(sum, sum + count);
    std::fill(sum, sum + count, NAN);
  }
  own.groups.back().push_back({type, sum, count, a_across, b_across, a, b, add});
}

void commit_products() {
  Products& own = engine.products[machine.current];
  own.begun = false;
  own.groups.emplace_back();
}

void wait_for_products(int pending) {
  if (is_broken(pending == 0 ? "wait_products<0>" : "wait_products<1>")) {
    return;
  }
  Products& own = engine.products[machine.current];
  ProductWait wait{&own, pending};
  meet_at(machine.warpgroups[machine.current / kWarpgroup], kWarpgroup, make_products, &wait);
  for (auto sum = own.sums.begin(); sum != own.sums.end();) {
    bool runs = false;
    for (const auto& group : own.groups) {
      runs = runs || std::any_of(group.begin(), group.end(),
                                 [&](const Product& product) { return product.sum == sum->first; });
    }
    if (!runs) {
      std::copy(sum->second.begin(), sum->second.end(), sum->first);
    }
    sum = runs ? std::next(sum) : own.sums.erase(sum);
  }
}

}  // namespace mlora::cuda

// For tests, which hold the same structures.
extern "C" __attribute__((visibility("default"))) int mlora_emulator_product(
    const mlora::cuda::ProductArguments* arguments, size_t size) {
  return size == sizeof(*arguments) ? mlora::cuda::launch_product(*arguments, {nullptr, 0}) : -1;
}

extern "C" __attribute__((visibility("default"))) int mlora_emulator_parts(const void* segments, int count,
                                                                           int adapters, int64_t rows,
                                                                           int32_t* starts, void* parts,
                                                                           int room) {
  const mlora::cuda::Batch batch = {static_cast<const mlora::cuda::Segment*>(segments), count, adapters,
                                    rows};
  return mlora::cuda::launch_parts(batch, {starts, static_cast<mlora::cuda::Tile*>(parts), room},
                                   {nullptr, 0});
}
