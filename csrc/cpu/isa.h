// Which instruction sets the library was compiled for and which of them this processor has.
#pragma once

#include <array>
#include <string_view>

namespace mlora::cpu {

#ifdef MLORA_X86
constexpr std::array<std::string_view, 4> kCompiledIsas = {"portable", "avx2", "avx512", "avx512bf16"};

inline bool supported(std::string_view isa) {
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (isa == "avx512bf16") {
    return avx512 && __builtin_cpu_supports("avx512bf16");
  }
  return isa == "avx512" ? avx512 : isa == "avx2" ? avx2 : isa == "portable";
}
#else
constexpr std::array<std::string_view, 1> kCompiledIsas = {"portable"};

inline bool supported(std::string_view isa) { return isa == "portable"; }
#endif

// The last compiled instruction set that this processor has.
inline std::string_view best_isa() {
  std::string_view best = kCompiledIsas[0];
  for (std::string_view isa : kCompiledIsas) {
    best = supported(isa) ? isa : best;
  }
  return best;
}

}  // namespace mlora::cpu
