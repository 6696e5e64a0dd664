#include "core/arena.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <mutex>
#include <unordered_map>
#include <utility>

#if ROWSHARD_CUDA
#include "core/cuda_check.h"
#endif

namespace rowshard {

namespace {
constexpr int64_t kAlignment = 256;
}

const char* to_string(Category category) {
  switch (category) {
    case Category::kRowwiseShard:
      return "rowwise_shard";
    case Category::kGathered:
      return "gathered";
    case Category::kColumnwise:
      return "columnwise";
    case Category::kScales:
      return "scales";
    case Category::kActivations:
      return "activations";
    case Category::kAdapter:
      return "adapter";
    case Category::kOptimizer:
      return "optimizer";
    case Category::kWorkspace:
      return "workspace";
    case Category::kCommunication:
      return "communication";
  }
  return "?";
}

// Every operation allocates scratch, so handing out a cached block allocates nothing itself: one
// look-up by size, and a slot whose name keeps its characters' memory.
struct Arena::State {
  using Blocks = std::vector<std::byte*>;
  using Cache = std::unordered_map<int64_t, Blocks>;  // rounded size -> free blocks; entries stay
  struct Slot {
    Category category;
    std::string name;
    int64_t bytes = 0;       // 0: the slot is free
    Blocks* home = nullptr;  // where the block goes back to
  };

  explicit State(Device d) : device(d) {}
  ~State() {
    trim(cache);
    trim(recorded);
  }

  Device device;
  std::mutex mutex;
  std::vector<Slot> slots;  // a Buffer's id is its index here
  std::vector<uint64_t> free_slots;
  Cache cache, recorded;  // `recorded` serves while `recording`
  CategoryBytes categories[kCategoryCount];
  CategoryBytes total;
  bool poison = false;
  bool recording = false;
  int64_t plan_address = int64_t{1} << 40;

  static void add(CategoryBytes& bytes, int64_t delta) {
    bytes.now += delta;
    bytes.peak = std::max(bytes.peak, bytes.now);
  }

  std::byte* system_allocate(int64_t bytes) {
    if (device.is_plan()) {  // an address to count with, never to touch
      plan_address += bytes;
      return reinterpret_cast<std::byte*>(plan_address - bytes);
    }
#if ROWSHARD_CUDA
    if (device.is_cuda()) {
      set_device(device);
      void* data = nullptr;
      const cudaError_t status = cudaMalloc(&data, bytes);
      if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return nullptr;
      }
      CUDA_CHECK(status);
      return static_cast<std::byte*>(data);
    }
#endif
    return static_cast<std::byte*>(std::aligned_alloc(kAlignment, bytes));
  }

  void system_free(std::byte* data) {
    if (device.is_plan())
      return;
#if ROWSHARD_CUDA
    if (device.is_cuda()) {
      cudaFree(data);
      return;
    }
#endif
    std::free(data);
  }

  /// Null when the device is out of memory.
  std::byte* take(Category category, std::string_view name, int64_t bytes, uint64_t& id) {
    const int64_t rounded = round_up(bytes, kAlignment);
    Blocks& home = (recording ? recorded : cache)[rounded];
    std::byte* data = nullptr;
    if (!home.empty()) {
      data = home.back();
      home.pop_back();
    } else {
      data = system_allocate(rounded);
      if (!data && !recording) {
        trim(cache);
        data = system_allocate(rounded);
      }
      if (!data)
        return nullptr;
    }
    if (free_slots.empty()) {
      free_slots.push_back(slots.size());
      slots.emplace_back();
    }
    id = free_slots.back();
    free_slots.pop_back();
    Slot& slot = slots[id];
    slot.category = category;
    slot.name.assign(name);
    slot.bytes = bytes;
    slot.home = &home;
    add(categories[static_cast<int>(category)], bytes);
    add(total, bytes);
    return data;
  }

  void give_back(std::byte* data, uint64_t id) {
    Slot& slot = slots[id];
    add(categories[static_cast<int>(slot.category)], -slot.bytes);
    add(total, -slot.bytes);
    slot.bytes = 0;
    slot.home->push_back(data);
    free_slots.push_back(id);
  }

  void trim(Cache& from) {
    for (auto& [size, blocks] : from) {
      for (std::byte* block : blocks)
        system_free(block);
      blocks.clear();
    }
  }
};

Buffer::~Buffer() {
  reset();
}

Buffer::Buffer(Buffer&& other) noexcept
    : arena_(std::move(other.arena_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      id_(std::exchange(other.id_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    reset();
    arena_ = std::move(other.arena_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    id_ = std::exchange(other.id_, 0);
  }
  return *this;
}

void Buffer::reset() {
  if (data_) {
    auto* state = static_cast<Arena::State*>(arena_.get());
    std::lock_guard lock(state->mutex);
    state->give_back(data_, id_);
  }
  data_ = nullptr;
  bytes_ = 0;
  arena_.reset();
}

Arena::Arena(Device device) : state_(std::make_shared<State>(device)) {}

Device Arena::device() const {
  return state_->device;
}

Buffer Arena::allocate(Category category, std::string_view name, int64_t bytes) {
  ROWSHARD_CHECK(bytes >= 0, LogicError, "arena: ", name, " asks for ", bytes, " bytes");
  Buffer buffer;
  if (bytes == 0)
    return buffer;
  std::byte* data = nullptr;
  {
    std::lock_guard lock(state_->mutex);
    data = state_->take(category, name, bytes, buffer.id_);
  }
  ROWSHARD_CHECK(data, DeviceError, "out of memory on ", state_->device, ": ", name, " (",
                 to_string(category), ") needs ", bytes, " bytes. Live now:\n", table(),
                 "shard over more ranks, or lower --micro-batch-size or --seq-len");
  buffer.arena_ = state_;
  buffer.data_ = data;
  buffer.bytes_ = bytes;
  if (state_->poison && !state_->device.is_plan()) {
    const int64_t rounded = round_up(bytes, kAlignment);
#if ROWSHARD_CUDA
    if (state_->device.is_cuda()) {
      if (state_->recording)
        return buffer;
      // The fill is on no stream of ours: work queued on the block's last use must be done before
      // it, and it must be done before work queued from now on.
      CUDA_CHECK(cudaDeviceSynchronize());
      CUDA_CHECK(cudaMemset(data, 0xff, rounded));
      CUDA_CHECK(cudaDeviceSynchronize());
      return buffer;
    }
#endif
    std::memset(data, 0xff, rounded);
  }
  return buffer;
}

Tensor Arena::tensor(Category category, std::string_view name, DType dtype, Shape shape) {
  Buffer buffer = allocate(category, name, shape.elements() * size_of(dtype));
  const View view(buffer.data(), dtype, shape, state_->device);
  return Tensor(std::move(buffer), view);
}

CategoryBytes Arena::bytes(Category category) const {
  std::lock_guard lock(state_->mutex);
  return state_->categories[static_cast<int>(category)];
}

CategoryBytes Arena::total() const {
  std::lock_guard lock(state_->mutex);
  return state_->total;
}

void Arena::mark_steady() {
  std::lock_guard lock(state_->mutex);
  for (auto& bytes : state_->categories)
    bytes.steady = bytes.now;
  state_->total.steady = state_->total.now;
}

void Arena::reset_peak() {
  std::lock_guard lock(state_->mutex);
  for (auto& bytes : state_->categories)
    bytes.peak = bytes.now;
  state_->total.peak = state_->total.now;
}

std::vector<std::pair<std::string, int64_t>> Arena::live(Category category) const {
  std::lock_guard lock(state_->mutex);
  std::vector<std::pair<std::string, int64_t>> result;
  for (const State::Slot& slot : state_->slots) {
    if (slot.bytes > 0 && slot.category == category)
      result.emplace_back(slot.name, slot.bytes);
  }
  std::sort(result.begin(), result.end(),
            [](const auto& a, const auto& b) { return a.second > b.second; });
  return result;
}

std::string Arena::table() const {
  std::lock_guard lock(state_->mutex);
  std::ostringstream out;
  out << std::left << std::setw(16) << "category" << std::right << std::setw(16) << "now"
      << std::setw(16) << "steady" << std::setw(16) << "peak"
      << "\n";
  const auto row = [&out](const char* name, const CategoryBytes& bytes) {
    out << std::left << std::setw(16) << name << std::right << std::setw(16) << bytes.now
        << std::setw(16) << bytes.steady << std::setw(16) << bytes.peak << "\n";
  };
  for (int i = 0; i < kCategoryCount; ++i) {
    row(to_string(static_cast<Category>(i)), state_->categories[i]);
  }
  row("total", state_->total);
  return out.str();
}

void Arena::set_poison(bool poison) {
  state_->poison = poison;
}

void Arena::trim() {
  std::lock_guard lock(state_->mutex);
  state_->trim(state_->cache);
}

ArenaRecording::ArenaRecording(Arena& arena) : state_(arena.state_) {
  ROWSHARD_CHECK(!state_->recording, LogicError, "arena: a graph is being recorded already");
  state_->recording = true;
}

ArenaRecording::~ArenaRecording() {
  state_->recording = false;
}

}  // namespace rowshard
