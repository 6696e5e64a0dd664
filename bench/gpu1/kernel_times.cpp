// Where a program's GPU time goes: every kernel's total, count and mean, by name and grid, printed
// at exit. A library that the CUDA driver loads into the program (CUPTI activity records); nothing
// is compiled in, and the program runs some per cent slower.
//
//   g++ -std=c++20 -O1 -shared -fPIC bench/gpu1/kernel_times.cpp -o kernel_times.so
//       -I/usr/local/cuda/include -L/usr/local/cuda/lib64 -lcupti
//   CUDA_INJECTION64_PATH=$PWD/kernel_times.so KERNEL_TIMES=out.txt rowshard bench step …
#include <cupti.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Total {
  double microseconds = 0;
  long count = 0;
};

// Never destroyed: records arrive until the process ends.
std::map<std::string, Total>& totals() {
  static auto* map = new std::map<std::string, Total>;
  return *map;
}
std::mutex mutex;

void add(const std::string& name, uint64_t begin, uint64_t end) {
  Total& total = totals()[name];
  total.microseconds += static_cast<double>(end - begin) * 1e-3;
  ++total.count;
}

std::string kernel_name(const CUpti_ActivityKernel10& kernel) {
  int status = 0;
  char* plain = abi::__cxa_demangle(kernel.name, nullptr, nullptr, &status);
  const std::string name = plain ? plain : kernel.name;
  std::free(plain);
  return "[" + std::to_string(kernel.gridX) + "," + std::to_string(kernel.gridY) + "," +
         std::to_string(kernel.gridZ) + "|" + std::to_string(kernel.blockX) + "] " +
         name.substr(0, 150);
}

void buffer_requested(uint8_t** buffer, size_t* size, size_t* records) {
  *size = 8 << 20;
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(8, *size));
  *records = 0;
}

void buffer_completed(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid) {
  const std::lock_guard lock(mutex);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
      const auto* copy = reinterpret_cast<const CUpti_ActivityMemcpy6*>(record);
      add("[memcpy kind " + std::to_string(copy->copyKind) + "]", copy->start, copy->end);
    } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const auto* fill = reinterpret_cast<const CUpti_ActivityMemset4*>(record);
      add("[memset]", fill->start, fill->end);
    } else {
      const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
      add(kernel_name(*kernel), kernel->start, kernel->end);
    }
  }
  std::free(buffer);
}

void print() {
  cuptiActivityFlushAll(1);
  const std::lock_guard lock(mutex);
  std::vector<std::pair<std::string, Total>> sorted(totals().begin(), totals().end());
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) {
    return a.second.microseconds > b.second.microseconds;
  });
  const char* path = std::getenv("KERNEL_TIMES");
  std::FILE* out = path ? std::fopen(path, "w") : stderr;
  if (!out)
    return;
  for (const auto& [name, total] : sorted)
    std::fprintf(out, "%10.1f us %6ld x %8.2f  %s\n", total.microseconds, total.count,
                 total.microseconds / static_cast<double>(total.count), name.c_str());
  if (path)
    std::fclose(out);
}

}  // namespace

extern "C" int InitializeInjection() {
  for (const auto kind : {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                          CUPTI_ACTIVITY_KIND_MEMSET})
    cuptiActivityEnable(kind);
  cuptiActivityRegisterCallbacks(buffer_requested, buffer_completed);
  std::atexit(print);
  return 1;
}
