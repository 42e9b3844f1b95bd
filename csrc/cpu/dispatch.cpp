// Run-time choice of the kernels' instruction set.
#include <array>
#include <atomic>
#include <string>

#include "check.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "cpu/tables.h"

namespace mlora::cpu {
namespace {

// In the order of kCompiledIsas, by dtype of x.
constexpr std::array<std::array<const Kernels*, 3>, kCompiledIsas.size()> kTables = {{
    {&kKernels_portable[0], &kKernels_portable[1], &kKernels_portable[2]},
#ifdef MLORA_X86
    {&kKernels_avx2[0], &kKernels_avx2[1], &kKernels_avx2[2]},
    {&kKernels_avx512[0], &kKernels_avx512[1], &kKernels_avx512[2]},
    {&kKernels_avx512bf16[0], &kKernels_avx512bf16[1], &kKernels_avx512bf16[2]},
    {&kKernels_avx512bf16[0], &kKernels_amx, &kKernels_avx512bf16[2]},
#endif
}};

size_t index_of(std::string_view name) {
  std::string known;
  for (size_t i = 0; i < kCompiledIsas.size(); ++i) {
    if (kCompiledIsas[i] == name) {
      return i;
    }
    known += known.empty() ? kCompiledIsas[i] : std::string(", ").append(kCompiledIsas[i]);
  }
  fail("isa: expected one of ", known, ", got '", name, "'");
}

std::atomic<size_t>& current() {
  static std::atomic<size_t> chosen = index_of(best_isa());
  return chosen;
}

}  // namespace

const Kernels& kernels(Scalar x_type) { return *kTables[current().load()][static_cast<size_t>(x_type)]; }

std::string_view isa() { return kCompiledIsas[current().load()]; }

void use_isa(std::string_view name) {
  const size_t index = index_of(name);
  MLORA_CHECK(supported(name), "isa: this processor does not have '", name, "'");
  current().store(index);
}

}  // namespace mlora::cpu
