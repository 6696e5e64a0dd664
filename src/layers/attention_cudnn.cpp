// cuDNN's fused attention through the header-only cudnn-frontend.
//
// Segments travel as ragged tensors: offsets and lengths on the device, in descending order of
// length. A micro-batch of equal segments of whole tiles is dense instead, which is faster. The
// backward is cuDNN's deterministic one, which keeps score gradients in scratch; calls are cut so
// that these fit (attention_scratch.h), and cutting changes no bit. Plans depend on rounded sizes
// and are kept for the process; making one takes tens of milliseconds, the first of a kind up to a
// second.
#include "layers/attention_calls.h"
#include "layers/attention_cuda.h"

#if ROWSHARD_CUDNN

#define CUDNN_FRONTEND_SKIP_JSON_LIB
#define NV_CUDNN_FRONTEND_DISABLE_LOGGING
#include <cudnn_frontend.h>

#include <atomic>
#include <map>
#include <mutex>
#include <tuple>

#include "core/cuda_check.h"
#include "core/log.h"
#include "layers/cudnn_library.h"

namespace rowshard::cuda {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Tensor_attributes;
using TensorHandle = std::shared_ptr<Tensor_attributes>;

enum Operand : int64_t {
  kQ = 1,
  kK,
  kV,
  kO,
  kLse,
  kDo,
  kDq,
  kDk,
  kDv,
  kLengths,
  kKvLengths,
  kOffsets,
  kKvOffsets,
  kLseOffsets
};

struct Key {
  int device;
  bool backward, dense;
  int64_t heads, kv_heads, call_kv_heads, head_dim, count, length, tokens;
  float scale;
  auto operator<=>(const Key&) const = default;
};

struct Plan {
  std::shared_ptr<fe::graph::Graph> graph;
  int64_t workspace = 0;
  std::string refusal;  // empty: usable
};

/// Throws fe's message as a string.
void require(fe::error_t status) {
  if (status.is_bad())
    throw status.get_message();
}

class GraphBuilder {
 public:
  explicit GraphBuilder(const Key& key) : key_(key), graph_(std::make_shared<fe::graph::Graph>()) {
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    if (!key_.dense) {
      offsets_ = small("offsets", kOffsets, key_.count + 1, fe::DataType_t::INT64);
      kv_offsets_ = small("kv_offsets", kKvOffsets, key_.count + 1, fe::DataType_t::INT64);
      lse_offsets_ = small("lse_offsets", kLseOffsets, key_.count + 1, fe::DataType_t::INT64);
      lengths_ = small("lengths", kLengths, key_.count, fe::DataType_t::INT32);
      kv_lengths_ = small("kv_lengths", kKvLengths, key_.count, fe::DataType_t::INT32);
    }
  }

  std::shared_ptr<fe::graph::Graph> forward() {
    auto options = fe::graph::SDPA_attributes()
                       .set_name("attention")
                       .set_generate_stats(true)
                       .set_attn_scale(key_.scale)
                       .set_causal_mask(true);
    if (!key_.dense)
      options.set_padding_mask(true).set_seq_len_q(lengths_).set_seq_len_kv(kv_lengths_);
    auto [o, lse] = graph_->sdpa(input("q", kQ, false), input("k", kK, true), input("v", kV, true),
                                 std::move(options));
    describe(*o, kO, false).set_output(true);
    describe_lse(*lse).set_output(true);
    return graph_;
  }

  std::shared_ptr<fe::graph::Graph> backward() {
    auto options = fe::graph::SDPA_backward_attributes()
                       .set_name("attention_backward")
                       .set_attn_scale(key_.scale)
                       .set_causal_mask(true)
                       .set_deterministic_algorithm(true);
    if (!key_.dense) {
      options.set_padding_mask(true)
          .set_seq_len_q(lengths_)
          .set_seq_len_kv(kv_lengths_)
          .set_max_total_seq_len_kv(key_.tokens);
    }
    Tensor_attributes lse;
    describe_lse(lse).set_name("lse");
    auto [dq, dk, dv] = graph_->sdpa_backward(
        input("q", kQ, false), input("k", kK, true), input("v", kV, true), input("o", kO, false),
        input("do", kDo, false), graph_->tensor(lse), std::move(options));
    describe(*dq, kDq, false).set_output(true);
    describe(*dk, kDk, true).set_output(true);
    describe(*dv, kDv, true).set_output(true);
    return graph_;
  }

 private:
  TensorHandle small(const char* name, Operand uid, int64_t count, fe::DataType_t type) {
    return graph_->tensor(Tensor_attributes()
                              .set_name(name)
                              .set_uid(uid)
                              .set_dim({count, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(type));
  }
  /// [count, heads, length, D] out of rows of all heads.
  Tensor_attributes& describe(Tensor_attributes& tensor, Operand uid, bool of_keys) {
    const int64_t all = of_keys ? key_.kv_heads : key_.heads;
    const int64_t heads = all / key_.kv_heads * key_.call_kv_heads, row = all * key_.head_dim;
    tensor.set_uid(uid)
        .set_dim({key_.count, heads, key_.length, key_.head_dim})
        .set_stride({key_.length * row, key_.head_dim, row, 1})
        .set_data_type(fe::DataType_t::BFLOAT16);
    if (!key_.dense)
      tensor.set_ragged_offset(of_keys ? kv_offsets_ : offsets_);
    return tensor;
  }
  Tensor_attributes& describe_lse(Tensor_attributes& tensor) {
    const int64_t heads = key_.heads / key_.kv_heads * key_.call_kv_heads;
    tensor.set_uid(kLse)
        .set_dim({key_.count, heads, key_.length, 1})
        .set_stride({key_.length * key_.heads, 1, key_.heads, 1})
        .set_data_type(fe::DataType_t::FLOAT);
    if (!key_.dense)
      tensor.set_ragged_offset(lse_offsets_);
    return tensor;
  }
  TensorHandle input(const char* name, Operand uid, bool of_keys) {
    Tensor_attributes tensor;
    describe(tensor, uid, of_keys).set_name(name);
    return graph_->tensor(tensor);
  }

  const Key& key_;
  std::shared_ptr<fe::graph::Graph> graph_;
  TensorHandle offsets_, kv_offsets_, lse_offsets_, lengths_, kv_lengths_;
};

/// One lock over the call: a handle belongs to one thread at a time.
struct Library {
  std::mutex mutex;
  std::map<int, cudnnHandle_t> handles;
  std::map<Key, Plan> plans;

  cudnnHandle_t handle(int device) {
    cudnnHandle_t& handle = handles[device];
    if (!handle) {
      const cudnnStatus_t status = cudnnCreate(&handle);
      if (status != CUDNN_STATUS_SUCCESS)
        throw message("cudnnCreate: ", cudnnGetErrorString(status));
    }
    return handle;
  }

  const Plan& plan(const Key& key) {
    const auto found = plans.find(key);
    if (found != plans.end())
      return found->second;
    Plan& plan = plans[key];
    try {
      GraphBuilder builder(key);
      const auto graph = key.backward ? builder.backward() : builder.forward();
      require(graph->validate());
      require(graph->build_operation_graph(handle(key.device)));
      require(graph->create_execution_plans({fe::HeurMode_t::A}));
      require(graph->check_support());
      require(graph->build_plans());
      require(graph->get_workspace_size(plan.workspace));
      plan.graph = graph;
    } catch (const std::string& refusal) {
      plan.refusal = refusal;
    }
    return plan;
  }
};
Library& the_library() {
  static Library* library = new Library;  // never destroyed: streams may outlive it
  return *library;
}

void say_refused(const std::string& reason) {
  log_once(reason,
           "attention runs through our own kernels, which are slower than cuDNN's: " + reason);
}

std::byte* advance(const void* data, int64_t bytes) {
  return const_cast<std::byte*>(static_cast<const std::byte*>(data)) + bytes;
}

void run(const AttentionCall& call, const Plan& plan, const AttentionOperands& x,
         const AttentionScratch& scratch, Library& library, Context& ctx) {
  const int64_t heads = x.q.dim(1), kv_heads = x.k.dim(1), head_bytes = x.q.dim(2) * 2;
  const int64_t entries = AttentionScratch::table_entries(x.q.dim(0));
  const auto column = [&](int64_t at) {
    return advance(scratch.table.view().data, (at * entries + call.first) * 8);
  };
  // Equal segments lie where their number says.
  const int64_t skipped = call.dense ? call.first * call.length : 0;
  std::byte* lengths = advance(scratch.table.view().data, 3 * entries * 8 + call.first * 4);
  const cudnnHandle_t handle = library.handle(ctx.device().index);
  cudnnSetStream(handle, native(ctx.stream));
  for (int64_t kv_head = 0; kv_head < kv_heads; kv_head += call.kv_heads) {
    const int64_t head = kv_head * (heads / kv_heads);
    const auto of_queries = [&](const auto& view) {
      return advance(view.data, (skipped * heads + head) * head_bytes);
    };
    const auto of_keys = [&](const auto& view) {
      return advance(view.data, (skipped * kv_heads + kv_head) * head_bytes);
    };
    std::unordered_map<int64_t, void*> pointers = {
        {kQ, of_queries(x.q)},
        {kK, of_keys(x.k)},
        {kV, of_keys(x.v)},
        {kO, of_queries(x.o)},
        {kLse, advance(x.lse.data, (skipped * heads + head) * 4)}};
    if (x.backward()) {
      pointers[kDo] = of_queries(x.d_o);
      pointers[kDq] = of_queries(x.dq);
      pointers[kDk] = of_keys(x.dk);
      pointers[kDv] = of_keys(x.dv);
    }
    if (!call.dense) {
      pointers[kOffsets] = column(0);
      pointers[kKvOffsets] = column(1);
      pointers[kLseOffsets] = column(2);
      pointers[kLengths] = lengths;
      pointers[kKvLengths] = lengths;
    }
    fe::error_t status = plan.graph->execute(handle, pointers, scratch.workspace.data());
    ROWSHARD_CHECK(!status.is_bad(), DeviceError, "cuDNN attention, q ", rowshard::describe(x.q),
                   ": ", status.get_message());
  }
}

}  // namespace

bool cudnn_attention(const AttentionOperands& x, const Segments& segments,
                     const AttentionScratch& scratch, Context& ctx) {
  if (const char* reason = cudnn_refuses(x.q, x.k)) {
    static std::atomic<const char*> said{nullptr};  // no message is built on every call
    if (said.exchange(reason) != reason)
      say_refused(message(reason, "; heads of ", x.q.dim(2), ", ", x.q.dim(0), " tokens"));
    return false;
  }
  if (!cudnn_unavailable_reason().empty()) {
    say_refused(cudnn_unavailable_reason());
    return false;
  }
  const int64_t heads = x.q.dim(1), kv_heads = x.k.dim(1);
  const std::vector<AttentionCall> calls = x.backward()
                                               ? backward_calls(segments.lengths(), heads, kv_heads)
                                               : forward_calls(segments.lengths(), kv_heads);
  Library& library = the_library();
  std::lock_guard lock(library.mutex);
  std::vector<const Plan*> plans;
  for (const AttentionCall& call : calls) {
    const Key key{ctx.device().index,
                  x.backward(),
                  call.dense,
                  heads,
                  kv_heads,
                  call.kv_heads,
                  x.q.dim(2),
                  call.count,
                  call.length,
                  call.dense || !x.backward() ? 0 : token_bucket(x.q.dim(0)),
                  static_cast<float>(x.scale)};
    if (call.kv_heads < kv_heads && heads / kv_heads * call.kv_heads % 4 != 0) {
      say_refused(message("segments of ", call.length, " must be cut by heads, and ",
                          heads / kv_heads, " heads a key head do not keep 16-byte addresses"));
      return false;
    }
    const Plan& plan = library.plan(key);
    if (!plan.refusal.empty() || plan.workspace > scratch.workspace.bytes()) {
      say_refused(
          message("cuDNN ", cudnnGetVersion(), ", ", call.count, " segments of up to ", call.length,
                  ", heads ", heads, " and ", kv_heads, " of ", x.q.dim(2), ": ",
                  !plan.refusal.empty() ? plan.refusal
                                        : message("wants a workspace of ", plan.workspace,
                                                  " bytes, ours is ", scratch.workspace.bytes())));
      return false;
    }
    plans.push_back(&plan);
  }
  if (!calls.front().dense) {
    attention_table(scratch.table, segments.by_length(),
                    calls.back().first + calls.back().count + 1, heads, kv_heads, x.q.dim(2),
                    ctx.stream);
  }
  for (size_t i = 0; i < calls.size(); ++i)
    run(calls[i], *plans[i], x, scratch, library, ctx);
  return true;
}

}  // namespace rowshard::cuda

#else

#include "core/log.h"

namespace rowshard::cuda {

bool cudnn_attention(const AttentionOperands& x, const Segments&, const AttentionScratch&,
                     Context&) {
  log_once("attention", message("attention runs through our own kernels, which are slower than ",
                                "cuDNN's: ", cudnn_refuses(x.q, x.k)));
  return false;
}

}  // namespace rowshard::cuda

#endif
