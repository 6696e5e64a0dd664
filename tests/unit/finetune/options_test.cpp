#include "finetune/options.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "core/error.h"

namespace rowshard {
namespace {

FinetuneOptions runnable() {
  FinetuneOptions options;
  options.model = "model";
  options.data = "data.safetensors";
  options.output_dir = "out";
  return options;
}

// What check says, or "" when it accepts.
std::string complaint(const std::function<void(FinetuneOptions&)>& change) {
  FinetuneOptions options = runnable();
  change(options);
  try {
    check(options);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Options, DefaultsRun) {
  EXPECT_EQ(complaint([](auto&) {}), "");
}

TEST(Options, TextAndValueAreInverse) {
  for (const char* text : {"block", "mx", "bf16"})
    EXPECT_STREQ(to_string(parse_recipe(text)), text);
  for (const char* text : {"cosine", "linear", "constant"}) {
    EXPECT_STREQ(to_string(parse_lr_schedule(text)), text);
  }
  for (const char* text : {"none", "block"})
    EXPECT_STREQ(to_string(parse_recompute(text)), text);
  for (const char* text : {"auto", "cuda", "host"}) {
    EXPECT_STREQ(to_string(parse_device_choice(text)), text);
  }
  EXPECT_EQ(parse_transport("peer"), CudaTransport::kPeer);
  EXPECT_EQ(parse_transport("nccl"), CudaTransport::kNccl);
  EXPECT_EQ(parse_transport("staged"), CudaTransport::kStaged);
  EXPECT_EQ(parse_transport("peer-staged"), CudaTransport::kPeerStaged);
  EXPECT_EQ(parse_columnwise_policy("release"), ColumnwisePolicy::kRelease);
  EXPECT_EQ(parse_columnwise_policy("resident"), ColumnwisePolicy::kResident);
  EXPECT_EQ(parse_columnwise_policy("direct"), ColumnwisePolicy::kDirect);
  EXPECT_EQ(parse_columnwise_policy("auto"), ColumnwisePolicy::kAuto);
  EXPECT_EQ(parse_gemm_backend("auto"), GemmBackend::kAuto);
  EXPECT_EQ(parse_gemm_backend("cublaslt"), GemmBackend::kCublasLt);
  EXPECT_EQ(parse_gemm_backend("own"), GemmBackend::kOwn);
  for (const char* text : {"true", "false", "resident", "2", "16"}) {
    EXPECT_EQ(to_string(parse_reshard_after_forward(text)), text);
  }
}

TEST(Options, AMistypedValueIsAnsweredWithTheValidOnes) {
  try {
    parse_recipe("blok");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "--recipe blok: use one of block, mx, bf16");
  }
  for (const char* text : {"", "True", "1", "0", "-2", "2x", "yes", "99999999999999999999"}) {
    EXPECT_THROW(parse_reshard_after_forward(text), ConfigError) << text;
  }
}

TEST(Options, EachRelationNamesItsOption) {
  using Options = FinetuneOptions;
  const double infinity = std::numeric_limits<double>::infinity();
  const std::vector<std::pair<std::string, std::function<void(Options&)>>> cases{
      {"--model", [](Options& o) { o.model = ""; }},
      {"--data", [](Options& o) { o.data = ""; }},
      {"--output-dir", [](Options& o) { o.output_dir = ""; }},
      {"--lora-r", [](Options& o) { o.lora.r = 0; }},
      {"--lora-alpha", [](Options& o) { o.lora.alpha = 0; }},
      {"--lora-dropout", [](Options& o) { o.lora.dropout = 1; }},
      {"--target-modules", [](Options& o) { o.lora.target_modules = {}; }},
      {"--target-modules",
       [](Options& o) {
         o.lora.target_modules = {"q_proj", ""};
       }},
      {"--target-modules",
       [](Options& o) {
         o.lora.target_modules = {"all-linear", "q_proj"};
       }},
      {"--target-modules",
       [](Options& o) {
         o.lora.target_modules = {"q_proj", "q_proj"};
       }},
      {"--dp-shard", [](Options& o) { o.execution.dp_shard = -1; }},
      {"--dp-replicate", [](Options& o) { o.execution.dp_replicate = 0; }},
      {"--tp", [](Options& o) { o.execution.tp = 0; }},
      {"--prefetch", [](Options& o) { o.execution.prefetch = 9; }},
      {"--prefetch", [](Options& o) { o.execution.prefetch = -1; }},
      {"--reshard-after-forward",
       [](Options& o) {
         o.execution.dp_shard = 6;
         o.execution.reshard_after_forward = parse_reshard_after_forward("4");
       }},
      {"--keep-over-accumulation", [](Options& o) { o.execution.keep_over_accumulation = true; }},
      {"--gemm-multiprocessors", [](Options& o) { o.execution.gemm_multiprocessors = -1; }},
      {"--columnwise",
       [](Options& o) {
         o.execution.recipe = Recipe::kMx;
         o.execution.columnwise = ColumnwisePolicy::kDirect;
       }},
      {"--micro-batch-size", [](Options& o) { o.micro_batch_size = 0; }},
      {"--grad-accum", [](Options& o) { o.grad_accum = 0; }},
      {"--seq-len", [](Options& o) { o.seq_len = -1; }},
      {"--max-steps", [](Options& o) { o.max_steps = -1; }},
      {"--epochs", [](Options& o) { o.epochs = 0; }},
      {"--lr", [](Options& o) { o.lr = 0; }},
      {"--lr", [=](Options& o) { o.lr = infinity; }},
      {"--warmup-steps",
       [](Options& o) {
         o.max_steps = 5;
         o.warmup_steps = 6;
       }},
      {"--weight-decay", [](Options& o) { o.weight_decay = -0.1; }},
      {"--clip-norm", [](Options& o) { o.clip_norm = -1; }},
      {"--eval-every", [](Options& o) { o.eval_every = 10; }},
      {"--pad-to", [](Options& o) { o.pad_to = 0; }},
      {"--pad-to", [](Options& o) { o.pad_to = 64, o.execution.tp = 2; }},
      {"--trace", [](Options& o) { o.cuda_graph = true, o.trace = "trace.json"; }},
      {"--save-every", [](Options& o) { o.save_every = -1; }},
      {"--keep", [](Options& o) { o.keep = 0; }},
      {"--resume", [](Options& o) { o.resume = ""; }},
  };
  for (const auto& [option, change] : cases) {
    const std::string text = complaint(change);
    EXPECT_EQ(text.substr(0, option.size()), option) << "said: " << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  }
}

TEST(Options, WhatLooksAlikeIsAccepted) {
  EXPECT_EQ(complaint([](FinetuneOptions& o) {
              o.execution.dp_shard = 8;
              o.execution.reshard_after_forward = parse_reshard_after_forward("4");
            }),
            "");
  EXPECT_EQ(complaint([](FinetuneOptions& o) {
              o.max_steps = 5;
              o.warmup_steps = 5;
              o.clip_norm = 0;
              o.lora.dropout = 0.99;
              o.execution.prefetch = 0;
            }),
            "");
}

TEST(Options, GenerateTakesOnePrompt) {
  GenerateOptions options;
  options.model = "model";
  EXPECT_THROW(check(options), ConfigError);
  options.prompt_ids = {1, 2};
  EXPECT_NO_THROW(check(options));
  options.prompt = "Hello";
  EXPECT_THROW(check(options), ConfigError);
  options.prompt_ids = {};
  EXPECT_NO_THROW(check(options));
  options.chat = true;
  EXPECT_NO_THROW(check(options));
  options.max_new_tokens = 0;
  EXPECT_THROW(check(options), ConfigError);
}

}  // namespace
}  // namespace rowshard
