// The operators' implementations for CPU tensors; the schemas stand in ops.cpp.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tensors.h"

namespace mlora::cpu {

std::tuple<Tensor, Tensor> lora_linear(const Tensor& x, const Tensor& weight,
                                       const std::optional<Tensor>& bias, const std::vector<Tensor>& lora_a,
                                       const std::vector<Tensor>& lora_b, const Tensor& segments,
                                       const Tensor& scaling, const std::optional<Tensor>& dropout_p,
                                       const std::optional<Tensor>& dropout_rng,
                                       const std::optional<Tensor>& layer,
                                       const std::optional<Tensor>& packed);

std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>> lora_linear_backward(
    const Tensor& dy, const Tensor& x, const Tensor& weight, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const Tensor& s, const Tensor& segments, const Tensor& scaling,
    const std::optional<Tensor>& dropout_p, const std::optional<Tensor>& dropout_rng,
    const std::optional<Tensor>& layer, bool need_dx, bool need_da, bool need_db,
    const std::optional<Tensor>& packed);

// Adds the low-rank part to a `y` that another product has made, and returns s.
Tensor lora_add(const Tensor& x, Tensor y, const std::vector<Tensor>& lora_a,
                const std::vector<Tensor>& lora_b, const Tensor& segments, const Tensor& scaling,
                const std::optional<Tensor>& dropout_p, const std::optional<Tensor>& dropout_rng,
                const std::optional<Tensor>& layer);

// Adds the low-rank part to a `dx` that another product has made, where one is wanted.
std::tuple<std::vector<Tensor>, std::vector<Tensor>> lora_add_backward(
    const Tensor& dy, const Tensor& x, std::optional<Tensor> dx, const std::vector<Tensor>& lora_a,
    const std::vector<Tensor>& lora_b, const Tensor& s, const Tensor& segments, const Tensor& scaling,
    const std::optional<Tensor>& dropout_p, const std::optional<Tensor>& dropout_rng,
    const std::optional<Tensor>& layer, bool need_da, bool need_db);

// The same with the adapters as tables of addresses (cpu/adapters.h), whose first matrices are a and b.
// Backward adds to the gradients, whose first ones are da and db.
std::tuple<Tensor, Tensor> lora_linear_table(const Tensor& x, const Tensor& weight,
                                             const std::optional<Tensor>& bias,
                                             const std::optional<Tensor>& packed, const Tensor& a,
                                             const Tensor& a_table, const Tensor& b, const Tensor& b_table,
                                             const Tensor& segments, const Tensor& scaling,
                                             const std::optional<Tensor>& dropout_p,
                                             const std::optional<Tensor>& dropout_rng,
                                             const std::optional<Tensor>& layer);
Tensor lora_add_table(const Tensor& x, Tensor y, const Tensor& a, const Tensor& a_table, const Tensor& b,
                      const Tensor& b_table, const Tensor& segments, const Tensor& scaling,
                      const std::optional<Tensor>& dropout_p, const std::optional<Tensor>& dropout_rng,
                      const std::optional<Tensor>& layer);
Tensor lora_linear_backward_table(const Tensor& dy, const Tensor& x, const Tensor& weight,
                                  const std::optional<Tensor>& packed, const Tensor& a, const Tensor& a_table,
                                  Tensor da, const Tensor& b, const Tensor& b_table, Tensor db,
                                  const Tensor& s, const Tensor& segments, const Tensor& scaling,
                                  const std::optional<Tensor>& dropout_p,
                                  const std::optional<Tensor>& dropout_rng,
                                  const std::optional<Tensor>& layer, bool need_dx);
void lora_add_backward_table(const Tensor& dy, const Tensor& x, std::optional<Tensor> dx, const Tensor& a,
                             const Tensor& a_table, Tensor da, const Tensor& b, const Tensor& b_table,
                             Tensor db, const Tensor& s, const Tensor& segments, const Tensor& scaling,
                             const std::optional<Tensor>& dropout_p, const std::optional<Tensor>& dropout_rng,
                             const std::optional<Tensor>& layer);

Tensor dropout_mask(const Tensor& segments, const Tensor& dropout_p, const Tensor& dropout_rng,
                    const Tensor& layer, int64_t rows, int64_t columns);

}  // namespace mlora::cpu
