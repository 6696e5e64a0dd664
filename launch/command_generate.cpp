#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>
#include <span>

#include "commands.h"
#include "finetune/generate.h"
#include "options.h"
#include "ranks.h"
#include "tokenizer.h"

namespace rowshard {

int command_generate(int argc, char** argv) {
  GenerateOptions options;
  if (!parse_options(argc, argv, std::cout, options))
    return 0;
  // Python is started before MPI is: a process that has communicators open should not fork.
  const bool is_first = detect_launch_environment().rank == 0;
  std::vector<int32_t> prompt(options.prompt_ids.begin(), options.prompt_ids.end());
  if (is_first && !options.prompt.empty()) {
    prompt = encode_text(options.model, options.prompt, options.chat);
  }
  std::vector<int32_t> ids;
  const auto body = [&](World& world) {
    const Bytes bytes = world.bootstrap().broadcast(std::as_bytes(std::span(prompt)), 0);
    prompt.resize(bytes.size() / sizeof(int32_t));
    std::memcpy(prompt.data(), bytes.data(), bytes.size());
    ids = run_generate(world, options, prompt);
  };
  const int code = run_on_ranks(options.execution.device, options.execution.transport, body);
  if (code != 0 || !is_first)
    return code;
  const std::string text = options.prompt.empty() ? "" : decode_ids(options.model, ids);
  if (options.json) {
    nlohmann::ordered_json object = {{"ids", ids}};
    if (!options.prompt.empty())
      object["text"] = text;
    std::cout << object.dump() << std::endl;
    return 0;
  }
  std::cout << "ids: " << join_ids(ids) << "\n";
  if (!options.prompt.empty())
    std::cout << text << "\n";
  return 0;
}

}  // namespace rowshard
