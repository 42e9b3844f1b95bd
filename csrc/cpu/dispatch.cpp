// Run-time choice of the kernels' instruction set.
#include <atomic>
#include <string>

#include "check.h"
#include "cpu/isa.h"
#include "cpu/kernels.h"
#include "cpu/tables.h"

namespace mlora::cpu {
namespace {

const Kernels* table(std::string_view isa) {
#ifdef MLORA_X86
  if (isa == "avx512bf16") {
    return kKernels_avx512bf16;
  }
  if (isa == "avx512") {
    return kKernels_avx512;
  }
  if (isa == "avx2") {
    return kKernels_avx2;
  }
#endif
  return kKernels_portable;
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> chosen = table(best_isa());
  return chosen;
}

}  // namespace

const Kernels& kernels(Scalar x_type) { return current().load()[static_cast<int>(x_type)]; }

const char* isa() { return current().load()->isa; }

void use_isa(std::string_view name) {
  std::string known;
  for (std::string_view compiled : kCompiledIsas) {
    if (compiled == name) {
      MLORA_CHECK(supported(name), "isa: this processor does not have '", name, "'");
      current().store(table(name));
      return;
    }
    known += known.empty() ? compiled : std::string(", ").append(compiled);
  }
  fail("isa: expected one of ", known, ", got '", name, "'");
}

}  // namespace mlora::cpu
