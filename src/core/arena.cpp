#include "core/arena.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <map>
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

struct Arena::State {
  struct Allocation {
    Category category;
    std::string name;
  };

  explicit State(Device d) : device(d) {}
  ~State() { trim(); }

  Device device;
  std::mutex mutex;
  std::unordered_map<uint64_t, std::pair<Allocation, int64_t>> live;
  std::map<int64_t, std::vector<std::byte*>> cache;  // rounded size -> free blocks
  CategoryBytes categories[kCategoryCount];
  CategoryBytes total;
  uint64_t next_id = 1;
  bool poison = false;
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

  void trim() {
    for (auto& [size, blocks] : cache) {
      for (std::byte* block : blocks)
        system_free(block);
    }
    cache.clear();
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
    const auto entry = state->live.find(id_);
    const auto& allocation = entry->second.first;
    Arena::State::add(state->categories[static_cast<int>(allocation.category)], -bytes_);
    Arena::State::add(state->total, -bytes_);
    state->live.erase(entry);
    state->cache[round_up(bytes_, kAlignment)].push_back(data_);
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
  const int64_t rounded = round_up(bytes, kAlignment);
  std::byte* data = nullptr;
  {
    std::lock_guard lock(state_->mutex);
    const auto cached = state_->cache.find(rounded);
    if (cached != state_->cache.end() && !cached->second.empty()) {
      data = cached->second.back();
      cached->second.pop_back();
    } else {
      data = state_->system_allocate(rounded);
      if (!data) {
        state_->trim();
        data = state_->system_allocate(rounded);
      }
    }
    if (data) {
      buffer.id_ = state_->next_id++;
      state_->live.emplace(buffer.id_,
                           std::pair{State::Allocation{category, std::string(name)}, bytes});
      State::add(state_->categories[static_cast<int>(category)], bytes);
      State::add(state_->total, bytes);
    }
  }
  ROWSHARD_CHECK(data, DeviceError, "out of memory on ", state_->device, ": ", name, " (",
                 to_string(category), ") needs ", bytes, " bytes. Live now:\n", table(),
                 "shard over more ranks, or lower --micro-batch-size or --seq-len");
  buffer.arena_ = state_;
  buffer.data_ = data;
  buffer.bytes_ = bytes;
  if (state_->poison && !state_->device.is_plan()) {
#if ROWSHARD_CUDA
    if (state_->device.is_cuda()) {
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
  for (const auto& [id, entry] : state_->live) {
    if (entry.first.category == category)
      result.emplace_back(entry.first.name, entry.second);
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
  state_->trim();
}

}  // namespace rowshard
