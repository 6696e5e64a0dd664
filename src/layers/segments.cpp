#include "layers/segments.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace rowshard {

std::vector<int32_t> lengths_of(const std::vector<int32_t>& bounds) {
  std::vector<int32_t> lengths(bounds.size());
  std::adjacent_difference(bounds.begin(), bounds.end(), lengths.begin());
  lengths.erase(lengths.begin());  // the first bound itself
  std::sort(lengths.begin(), lengths.end(), std::greater<>());
  return lengths;
}

Segments::Segments(std::vector<int32_t> bounds, Context& ctx) {
  const int64_t tokens = bounds.empty() ? 0 : bounds.back();
  const auto row = [&](const char* name) {
    return ctx.arena.tensor(Category::kActivations, name, DType::kI32,
                            {std::max<int64_t>(tokens, 0)});
  };
  starts_ = row("segments.starts");
  ends_ = row("segments.ends");
  positions_ = row("segments.positions");
  by_length_ = ctx.arena.tensor(Category::kActivations, "segments.by_length", DType::kI32,
                                {std::max<int64_t>(tokens, 0), 2});
  assign(std::move(bounds), ctx.stream);
}

void Segments::assign(std::vector<int32_t> bounds, Stream& stream) {
  const bool ascending =
      bounds.size() >= 2 && bounds.front() == 0 &&
      std::adjacent_find(bounds.begin(), bounds.end(), std::greater_equal<>()) == bounds.end();
  std::string text;
  if (!ascending) {
    for (size_t i = 0; i < std::min<size_t>(bounds.size(), 16); ++i)
      text += message(" ", bounds[i]);
    throw ShapeError(message("segment bounds must start at 0 and ascend; got", text,
                             bounds.size() > 16 ? " …" : ""));
  }
  const int64_t tokens = bounds.back();
  ROWSHARD_CHECK(tokens == starts_.shape()[0], ShapeError, "segments of ", starts_.shape()[0],
                 " tokens cannot take bounds of ", tokens, " tokens");
  std::vector<int32_t> starts(tokens), ends(tokens), positions(tokens);
  std::vector<std::pair<int32_t, int32_t>> by_length;  // start, length
  for (size_t s = 0; s + 1 < bounds.size(); ++s) {
    by_length.emplace_back(bounds[s], bounds[s + 1] - bounds[s]);
    for (int32_t t = bounds[s]; t < bounds[s + 1]; ++t) {
      starts[t] = bounds[s];
      ends[t] = bounds[s + 1];
      positions[t] = t - bounds[s];
    }
  }
  std::stable_sort(by_length.begin(), by_length.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  std::vector<int32_t> pairs;
  for (const auto& [start, length] : by_length)
    pairs.insert(pairs.end(), {start, length});
  while (static_cast<int64_t>(pairs.size()) < 2 * tokens)
    pairs.insert(pairs.end(), {static_cast<int32_t>(tokens), 0});
  const auto upload = [&](const Tensor& to, const std::vector<int32_t>& from) {
    copy(to, ConstView(from.data(), DType::kI32, to.shape(), kHost), stream);
  };
  upload(starts_, starts);
  upload(ends_, ends);
  upload(positions_, positions);
  upload(by_length_, pairs);
  lengths_ = lengths_of(bounds);
  bounds_ = std::move(bounds);
}

}  // namespace rowshard
