// What the caller is doing. Declared, never guessed: inference and validation both run only
// forward, but after validation the next backward must find everything it needs.
#pragma once

#include <string>

namespace rowshard {

enum class Phase { kInference, kValidation, kTraining };

inline const char* to_string(Phase phase) {
  switch (phase) {
    case Phase::kInference:
      return "inference";
    case Phase::kValidation:
      return "validation";
    case Phase::kTraining:
      return "training";
  }
  return "?";
}

enum class Pass { kForward, kBackward };

inline const char* to_string(Pass pass) {
  return pass == Pass::kForward ? "forward" : "backward";
}

}  // namespace rowshard
