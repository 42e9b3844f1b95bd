#include "cpu/base_gemm.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <limits>
#include <mutex>
#include <stdexcept>

// Weak: a torch without oneDNN has no such symbol, and this library must load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu__linear_pointwise(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, const char* attr,
    const double** scalars, int64_t scalars_len, const char** algorithm, AtenTensorHandle* result);

namespace mlora::cpu {
namespace {

constexpr int kUnknown = -1;
// oneDNN must win by this much: at a tie the bits stay those of F.linear.
constexpr double kMargin = 1.3;

std::mutex probe_mutex;
std::array<std::atomic<int>, 3> chosen = {kUnknown, kUnknown, kUnknown};

std::atomic<int>& choice(ScalarType type) { return chosen[static_cast<size_t>(scalar_of(type))]; }

Tensor aten_linear(const Tensor& x, const Tensor& weight, const Tensor* bias) {
  Tensor y = empty_cpu(x.size(0), weight.size(0), x.scalar_type());
  const Tensor weight_t = transposed(weight);
  if (bias) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(y.get(), bias->get(), x.get(), weight_t.get(), 1.0, 1.0));
  } else {
    TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(y.get(), x.get(), weight_t.get()));
  }
  return y;
}

Tensor onednn_linear(const Tensor& x, const Tensor& weight, const Tensor* bias) {
  if (bias && bias->size(0) > 1 && bias->stride(0) != 1) {  // oneDNN reads a bias as if it were dense
    const Tensor dense = torch::stable::contiguous(*bias);
    return onednn_linear(x, weight, &dense);
  }
  AtenTensorHandle result = nullptr;
  AtenTensorHandle bias_handle = bias ? bias->get() : nullptr;
  const char* algorithm = "";
  TORCH_ERROR_CODE_CHECK(aoti_torch_cpu__linear_pointwise(
      x.get(), weight.get(), bias ? &bias_handle : nullptr, "none", nullptr, 0, &algorithm, &result));
  return Tensor(result);
}

// Below this many multiply-adds, preparing oneDNN's product costs more than it saves.
constexpr int64_t kOneDnnWork = int64_t{1} << 20;

Tensor linear_with(BaseGemm gemm, const Tensor& x, const Tensor& weight, const Tensor* bias) {
  return gemm == BaseGemm::kOneDnn ? onednn_linear(x, weight, bias) : aten_linear(x, weight, bias);
}

void check_packed(const Tensor& packed, const Tensor& weight) {
  MLORA_CHECK(aoti_torch_cpu__linear_pointwise, "packed: expected none, this torch has no oneDNN");
  MLORA_CHECK(packed.dim() == 2 && packed.size(0) == weight.size(0) && packed.size(1) == weight.size(1) &&
                  packed.scalar_type() == weight.scalar_type(),
              "packed: expected ", dtype_name(weight.scalar_type()), " of shape ", shape_of(weight), ", got ",
              dtype_name(packed.scalar_type()), " of shape ", shape_of(packed));
}

Tensor probe_operand(int64_t rows, int64_t cols, ScalarType type) {
  Tensor tensor = empty_cpu(rows, cols, type);
  if (type == ScalarType::Float) {
    std::fill_n(static_cast<float*>(tensor.mutable_data_ptr()), rows * cols, 1.0f);
  } else {
    std::fill_n(static_cast<uint16_t*>(tensor.mutable_data_ptr()), rows * cols,
                uint16_t{0x3f80});  // 1.0 in bf16
  }
  return tensor;
}

// oneDNN refuses a dtype that the processor has no arithmetic for: bf16 without AVX-512, fp16 nearly
// everywhere.
bool onednn_serves(ScalarType type) {
  if (!aoti_torch_cpu__linear_pointwise) {
    return false;
  }
  try {
    const Tensor probe = probe_operand(16, 16, type);
    onednn_linear(probe, probe, nullptr);
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

// Best of fifteen, forward and dX, the two libraries taking turns: five were too few beside a busy neighbour.
BaseGemm measure(ScalarType type) {
  const Tensor x = probe_operand(256, 1024, type);
  const Tensor weight = probe_operand(1024, 1024, type);
  const Tensor weight_t = transposed(weight);
  std::array<double, 2> best = {std::numeric_limits<double>::max(), std::numeric_limits<double>::max()};
  for (int round = 0; round < 16; ++round) {
    for (BaseGemm gemm : {BaseGemm::kAten, BaseGemm::kOneDnn}) {
      const auto start = std::chrono::steady_clock::now();
      linear_with(gemm, x, weight, nullptr);
      linear_with(gemm, x, weight_t, nullptr);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      if (round > 0) {
        best[static_cast<size_t>(gemm)] = std::min(best[static_cast<size_t>(gemm)], seconds.count());
      }
    }
  }
  return best[1] * kMargin < best[0] ? BaseGemm::kOneDnn : BaseGemm::kAten;
}

}  // namespace

BaseGemm base_gemm(ScalarType type) {
  std::atomic<int>& slot = choice(type);
  if (slot.load() == kUnknown) {
    const std::lock_guard<std::mutex> lock(probe_mutex);
    if (slot.load() == kUnknown) {
      // fp16 stays with aten, which converts where the processor cannot multiply
      const bool measured = type != ScalarType::Half && onednn_serves(type);
      slot.store(static_cast<int>(measured ? measure(type) : BaseGemm::kAten));
    }
  }
  return static_cast<BaseGemm>(slot.load());
}

std::string base_gemm_name(ScalarType type) {
  MLORA_CHECK(is_scalar(type), "dtype: expected float32, bfloat16 or float16, got ", dtype_name(type));
  return base_gemm(type) == BaseGemm::kOneDnn ? "onednn" : "aten";
}

void set_base_gemm(ScalarType type, const std::string& name) {
  MLORA_CHECK(is_scalar(type), "dtype: expected float32, bfloat16 or float16, got ", dtype_name(type));
  MLORA_CHECK(name == "aten" || name == "onednn", "name: expected 'aten' or 'onednn', got '", name, "'");
  MLORA_CHECK(name == "aten" || onednn_serves(type), "name: oneDNN does not serve ", dtype_name(type),
              " with this torch on this processor; use 'aten'");
  choice(type).store(static_cast<int>(name == "onednn" ? BaseGemm::kOneDnn : BaseGemm::kAten));
}

Tensor base_linear(const Tensor& x, const Tensor& weight, const Tensor* bias, const Tensor* packed) {
  if (packed) {
    check_packed(*packed, weight);
  }
  if (x.size(0) == 0) {
    return empty_cpu(0, weight.size(0), x.scalar_type());
  }
  if (x.size(0) * weight.size(0) * weight.size(1) < kOneDnnWork) {
    return aten_linear(x, weight, bias);
  }
  return packed ? onednn_linear(x, *packed, bias) : linear_with(base_gemm(x.scalar_type()), x, weight, bias);
}

Tensor base_linear_dx(const Tensor& dy, const Tensor& weight, const Tensor* packed) {
  return base_linear(dy, transposed(weight), nullptr, packed);
}

}  // namespace mlora::cpu
