// The only place where operator schemas are declared.
#include <string>

#include "cpu/adamw_op.h"
#include "cpu/base_gemm.h"
#include "cpu/kernels.h"
#include "cpu/lora_linear.h"

namespace mlora {
namespace {

void check_dtype(const Tensor& weight, const Tensor& x) {
  MLORA_CHECK(is_scalar(x.scalar_type()), "x: expected dtype Float, BFloat16 or Half, got ",
              dtype_name(x.scalar_type()));
  MLORA_CHECK(weight.scalar_type() == x.scalar_type(), "weight: expected dtype ", dtype_name(x.scalar_type()),
              " (that of x), got ", dtype_name(weight.scalar_type()));
}

Tensor base_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                   const std::optional<Tensor>& packed) {
  check_dtype(weight, x);
  MLORA_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == weight.size(0) &&
                        bias->scalar_type() == x.scalar_type()),
              "bias: expected a ", dtype_name(x.scalar_type()), " vector of ", weight.size(0),
              " numbers, got ", dtype_name(bias->scalar_type()), " of shape ", shape_of(*bias));
  MLORA_CHECK(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
              "weight: expected [d_out, d_in] for x ", shape_of(x), ", got ", shape_of(weight));
  return cpu::base_linear(x, weight, bias ? &*bias : nullptr, packed ? &*packed : nullptr);
}

Tensor base_linear_dx(const Tensor& dy, const Tensor& weight, const std::optional<Tensor>& packed) {
  check_dtype(weight, dy);
  MLORA_CHECK(dy.dim() == 2 && weight.dim() == 2 && dy.size(1) == weight.size(0),
              "weight: expected [d_out, d_in] for dy ", shape_of(dy), ", got ", shape_of(weight));
  return cpu::base_linear_dx(dy, weight, packed ? &*packed : nullptr);
}

std::string base_gemm(ScalarType dtype) { return cpu::base_gemm_name(dtype); }
void set_base_gemm(ScalarType dtype, std::string name) { cpu::set_base_gemm(dtype, name); }
std::string cpu_isa() { return std::string(cpu::isa()); }
void use_cpu_isa(std::string name) { cpu::use_isa(name); }

}  // namespace
}  // namespace mlora

STABLE_TORCH_LIBRARY(mlora_ext, library) {
  library.def(
      "lora_linear(Tensor x, Tensor weight, Tensor? bias, Tensor[] lora_a, Tensor[] lora_b, Tensor segments, "
      "Tensor scaling, Tensor? dropout_p, Tensor? dropout_rng, Tensor? layer, Tensor? packed) "
      "-> (Tensor y, Tensor s)");
  library.def(
      "lora_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor[] lora_a, Tensor[] lora_b, Tensor s, "
      "Tensor segments, Tensor scaling, Tensor? dropout_p, Tensor? dropout_rng, Tensor? layer, bool need_dx, "
      "bool need_da, bool need_db, Tensor? packed) -> (Tensor dx, Tensor[] da, Tensor[] db)");
  library.def(
      "lora_add(Tensor x, Tensor(a!) y, Tensor[] lora_a, Tensor[] lora_b, Tensor segments, Tensor scaling, "
      "Tensor? dropout_p, Tensor? dropout_rng, Tensor? layer) -> Tensor");
  library.def(
      "lora_add_backward(Tensor dy, Tensor x, Tensor(a!)? dx, Tensor[] lora_a, Tensor[] lora_b, Tensor s, "
      "Tensor segments, Tensor scaling, Tensor? dropout_p, Tensor? dropout_rng, Tensor? layer, "
      "bool need_da, bool need_db) -> (Tensor[] da, Tensor[] db)");
  library.def(
      "lora_linear.table(Tensor x, Tensor weight, Tensor? bias, Tensor? packed, Tensor a, Tensor a_table, "
      "Tensor b, Tensor b_table, Tensor segments, Tensor scaling, Tensor? dropout_p, Tensor? dropout_rng, "
      "Tensor? layer) -> (Tensor y, Tensor s)");
  library.def(
      "lora_add.table(Tensor x, Tensor(a!) y, Tensor a, Tensor a_table, Tensor b, Tensor b_table, "
      "Tensor segments, Tensor scaling, Tensor? dropout_p, Tensor? dropout_rng, Tensor? layer) -> Tensor");
  library.def(
      "lora_linear_backward.table(Tensor dy, Tensor x, Tensor weight, Tensor? packed, Tensor a, "
      "Tensor a_table, Tensor(a!) da, Tensor b, Tensor b_table, Tensor(b!) db, Tensor s, Tensor segments, "
      "Tensor scaling, Tensor? dropout_p, Tensor? dropout_rng, Tensor? layer, bool need_dx) -> Tensor");
  library.def(
      "lora_add_backward.table(Tensor dy, Tensor x, Tensor(a!)? dx, Tensor a, Tensor a_table, "
      "Tensor(b!) da, Tensor b, Tensor b_table, Tensor(c!) db, Tensor s, Tensor segments, Tensor scaling, "
      "Tensor? dropout_p, Tensor? dropout_rng, Tensor? layer) -> ()");
  library.def(
      "dropout_mask(Tensor segments, Tensor dropout_p, Tensor dropout_rng, Tensor layer, int rows, int "
      "columns) -> Tensor");
  library.def("base_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? packed) -> Tensor");
  library.def("base_linear_dx(Tensor dy, Tensor weight, Tensor? packed) -> Tensor");
  library.def("base_gemm(ScalarType dtype) -> str");
  library.def("set_base_gemm(ScalarType dtype, str name) -> ()");
  library.def(
      "adamw(Tensor(a!)[] gradients, Tensor(b!)[] parameters, Tensor(c!)[] first, Tensor(d!)[] second, "
      "Tensor(e!)[] copies, float lr, float beta1, float beta2, float eps, float weight_decay, int step, "
      "float scale, bool clear, int threads) -> float");
  library.def("squares(Tensor[] tensors, int threads) -> float");
  library.def("cpu_isa() -> str");
  library.def("use_cpu_isa(str name) -> ()");
  library.def(
      "cuda_plan(Tensor segments, int rows, int adapters, int tiles, int splits, bool own) -> Tensor");
  library.def("cuda_driver_refusal() -> str");
  library.def("cuda_has_own_products(Tensor tensor) -> bool");
  library.def("cuda_capture(Tensor tensor) -> int");
  library.def(
      "cuda_forward(Tensor x, Tensor[] weights, Tensor[] biases, Tensor(a!)[] products, Tensor a, "
      "Tensor a_table, Tensor b, Tensor b_table, bool a_aligned, bool b_aligned, int max_rank, Tensor "
      "plan, int tiles, "
      "int splits, "
      "Tensor scaling, Tensor? dropout_p, Tensor? dropout_rng, Tensor? layers, bool save_masks, int group) "
      "-> (Tensor[] y, Tensor s, Tensor? keep)");
  library.def(
      "cuda_backward(Tensor[] dys, Tensor x, Tensor[] weights, Tensor(a!)? product, Tensor a, Tensor "
      "a_table, "
      "Tensor(b!)? da, Tensor b, Tensor b_table, Tensor(c!)? db, bool a_aligned, bool b_aligned, int "
      "max_rank, Tensor s, "
      "Tensor? keep, "
      "Tensor plan, int tiles, int splits, int slots, Tensor scaling, Tensor? dropout_p, Tensor? "
      "dropout_rng, "
      "Tensor? layers, bool need_dx, bool add, int group, int left, bool once) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mlora_ext, CPU, library) {
  library.impl("lora_linear", TORCH_BOX(&mlora::cpu::lora_linear));
  library.impl("lora_linear_backward", TORCH_BOX(&mlora::cpu::lora_linear_backward));
  library.impl("lora_add", TORCH_BOX(&mlora::cpu::lora_add));
  library.impl("lora_add_backward", TORCH_BOX(&mlora::cpu::lora_add_backward));
  library.impl("lora_linear.table", TORCH_BOX(&mlora::cpu::lora_linear_table));
  library.impl("lora_add.table", TORCH_BOX(&mlora::cpu::lora_add_table));
  library.impl("lora_linear_backward.table", TORCH_BOX(&mlora::cpu::lora_linear_backward_table));
  library.impl("lora_add_backward.table", TORCH_BOX(&mlora::cpu::lora_add_backward_table));
  library.impl("dropout_mask", TORCH_BOX(&mlora::cpu::dropout_mask));
  library.impl("adamw", TORCH_BOX(&mlora::cpu::adamw));
  library.impl("squares", TORCH_BOX(&mlora::cpu::squares));
  library.impl("base_linear", TORCH_BOX(&mlora::base_linear));
  library.impl("base_linear_dx", TORCH_BOX(&mlora::base_linear_dx));
}

// A packed weight among the arguments brings this key.
STABLE_TORCH_LIBRARY_IMPL(mlora_ext, MkldnnCPU, library) {
  library.impl("lora_linear", TORCH_BOX(&mlora::cpu::lora_linear));
  library.impl("lora_linear_backward", TORCH_BOX(&mlora::cpu::lora_linear_backward));
  library.impl("lora_linear.table", TORCH_BOX(&mlora::cpu::lora_linear_table));
  library.impl("lora_linear_backward.table", TORCH_BOX(&mlora::cpu::lora_linear_backward_table));
  library.impl("base_linear", TORCH_BOX(&mlora::base_linear));
  library.impl("base_linear_dx", TORCH_BOX(&mlora::base_linear_dx));
}

STABLE_TORCH_LIBRARY_IMPL(mlora_ext, CompositeExplicitAutograd, library) {
  library.impl("base_gemm", TORCH_BOX(&mlora::base_gemm));
  library.impl("set_base_gemm", TORCH_BOX(&mlora::set_base_gemm));
  library.impl("cpu_isa", TORCH_BOX(&mlora::cpu_isa));
  library.impl("use_cpu_isa", TORCH_BOX(&mlora::use_cpu_isa));
}
