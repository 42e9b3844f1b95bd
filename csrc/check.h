// Argument checks whose messages name the argument, what was expected and what came.
#pragma once

#include <sstream>
#include <stdexcept>

namespace mlora {

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace mlora

#define MLORA_CHECK(condition, ...)  \
  do {                               \
    if (!(condition)) [[unlikely]] { \
      ::mlora::fail(__VA_ARGS__);    \
    }                                \
  } while (false)
