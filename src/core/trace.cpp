#include "core/trace.h"

#include <iomanip>
#include <sstream>
#include <utility>

namespace rowshard {

namespace {

Trace* active_trace = nullptr;

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      result += '\\';
    result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return result + '"';
}

}  // namespace

const char* to_string(TraceLane lane) {
  switch (lane) {
    case TraceLane::kUnits:
      return "units";
    case TraceLane::kCompute:
      return "compute";
    case TraceLane::kGathers:
      return "gathers";
    case TraceLane::kReductions:
      return "reductions";
  }
  return "?";
}

Trace::Trace(Stream& stream) {
  ROWSHARD_CHECK(!active_trace, LogicError, "a trace is being written already");
  stream.synchronize();
  origin_ = mark(stream);
  active_trace = this;
}

Trace::~Trace() {
  active_trace = nullptr;
}

Trace* Trace::active() {
  return active_trace;
}

// On the host an event would take over what the stream has pending; the clock does not.
Trace::Mark Trace::mark(Stream& stream) {
  Mark mark;
  if (stream.device().is_cuda()) {
    mark.event.emplace(stream.device(), /*timing=*/true);
    mark.event->record(stream);
  }
  mark.seconds = now_seconds();
  return mark;
}

double Trace::microseconds(const Mark& mark) const {
  return mark.event ? elapsed_ms(*origin_.event, *mark.event) * 1e3
                    : (mark.seconds - origin_.seconds) * 1e6;
}

std::string Trace::json(int rank) const {
  std::ostringstream out;
  out << std::fixed << std::setprecision(3) << "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
      << R"({"name":"process_name","ph":"M","pid":)" << rank << R"(,"tid":0,"args":{"name":"rank )"
      << rank << "\"}}";
  for (const TraceLane lane :
       {TraceLane::kUnits, TraceLane::kCompute, TraceLane::kGathers, TraceLane::kReductions}) {
    out << ",\n"
        << R"({"name":"thread_name","ph":"M","pid":)" << rank
        << ",\"tid\":" << static_cast<int>(lane) << R"(,"args":{"name":")" << to_string(lane)
        << "\"}}";
  }
  for (const Span& span : spans_) {
    if (!span.ended)
      continue;
    const double begin = microseconds(span.begin);
    out << ",\n{\"name\":" << quoted(span.name) << ",\"ph\":\"X\",\"pid\":" << rank
        << ",\"tid\":" << static_cast<int>(span.lane) << ",\"ts\":" << begin
        << ",\"dur\":" << microseconds(span.end) - begin;
    if (span.bytes > 0)
      out << ",\"args\":{\"bytes\":" << span.bytes << "}";
    out << "}";
  }
  out << "\n]}\n";
  return out.str();
}

TraceSpan::TraceSpan(Stream& stream, TraceLane lane, const std::string& name, int64_t bytes) {
  // Under capture an event would belong to the graph, and have no time.
  if (!active_trace || stream.device().is_plan() || stream.capturing())
    return;
  trace_ = active_trace;
  stream_ = &stream;
  span_ = &trace_->spans_.emplace_back(
      Trace::Span{lane, name, bytes, Trace::mark(stream), Trace::Mark{}, false});
}

TraceSpan::TraceSpan(TraceSpan&& other) noexcept {
  *this = std::move(other);
}

TraceSpan& TraceSpan::operator=(TraceSpan&& other) noexcept {
  std::swap(trace_, other.trace_);
  std::swap(span_, other.span_);
  std::swap(stream_, other.stream_);
  return *this;
}

void TraceSpan::end() {
  if (!trace_)
    return;
  if (trace_ == active_trace) {
    span_->end = Trace::mark(*stream_);
    span_->ended = true;
  }
  trace_ = nullptr;
}

}  // namespace rowshard
