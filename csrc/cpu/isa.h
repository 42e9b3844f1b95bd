// Which instruction sets the library was compiled for and which of them this processor has.
#pragma once

#include <array>
#include <string_view>

#ifdef MLORA_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mlora::cpu {

#ifdef MLORA_X86
constexpr std::array<std::string_view, 5> kCompiledIsas = {"portable", "avx2", "avx512", "avx512bf16", "amx"};

// Matrix tiles: the processor and the kernel must have them, and a process must ask before it uses them.
inline bool amx_permitted() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
    return false;
  }
  const bool tiles_and_bf16 = (edx >> 24 & 1) && (edx >> 22 & 1);
  return tiles_and_bf16 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

inline bool supported(std::string_view isa) {
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool avx512bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (isa == "amx") {
    return avx512bf16 && amx_permitted();
  }
  if (isa == "avx512bf16") {
    return avx512bf16;
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
