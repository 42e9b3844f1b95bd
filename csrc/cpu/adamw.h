// One AdamW update of a span of numbers in one pass: gradient, fp32 state, and a low-precision copy; and the
// sum of the squares of a span.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu/kernels.h"

namespace mlora::cpu::MLORA_ISA {

struct AdamWConstants {
  Simd::Vec scale, beta1, rest1, beta2, rest2, keep, step, root, eps;

  explicit AdamWConstants(const AdamWArgs& args)
      : scale(Simd::set1(args.scale)),
        beta1(Simd::set1(args.beta1)),
        rest1(Simd::set1(1.0f - args.beta1)),
        beta2(Simd::set1(args.beta2)),
        rest2(Simd::set1(1.0f - args.beta2)),
        keep(Simd::set1(args.keep)),
        step(Simd::set1(-args.step_size)),
        root(Simd::set1(args.root)),
        eps(Simd::set1(args.eps)) {}
};

// Numbers [i, i + n); `N` is empty for a whole vector, or the count n. Adds the gradient's squares to
// `squares`.
template <typename G, typename C, typename... N>
inline void adamw_vector(const AdamWArgs& args, const AdamWConstants& c, Simd::Vec& squares, int64_t i,
                         N... n) {
  G* const gradients = static_cast<G*>(args.gradient) + i;
  const Simd::Vec given = Simd::load(gradients, n...);
  squares = Simd::fma(given, given, squares);
  const Simd::Vec gradient = Simd::mul(given, c.scale);
  const Simd::Vec first = Simd::fma(Simd::load(args.first + i, n...), c.beta1, Simd::mul(gradient, c.rest1));
  const Simd::Vec square = Simd::mul(Simd::mul(gradient, gradient), c.rest2);
  const Simd::Vec second = Simd::fma(Simd::load(args.second + i, n...), c.beta2, square);
  const Simd::Vec root = Simd::fma(Simd::sqrt(second), c.root, c.eps);
  const Simd::Vec decayed = Simd::mul(Simd::load(args.parameter + i, n...), c.keep);
  const Simd::Vec parameter = Simd::fma(Simd::div(first, root), c.step, decayed);
  Simd::store(args.first + i, first, n...);
  Simd::store(args.second + i, second, n...);
  Simd::store(args.parameter + i, parameter, n...);
  if (args.clear) {
    Simd::store(gradients, Simd::set1(0.0f), n...);
  }
  if constexpr (!std::is_void_v<C>) {
    Simd::store(static_cast<C*>(args.copy) + i, parameter, n...);
  }
}

template <typename G, typename C>
float adamw_span(const AdamWArgs& args, int64_t begin, int64_t end) {
  const AdamWConstants constants(args);
  Simd::Vec squares[4] = {Simd::set1(0.0f), Simd::set1(0.0f), Simd::set1(0.0f), Simd::set1(0.0f)};
  int64_t i = begin;
  for (; i + Simd::kLanes <= end; i += Simd::kLanes) {
    adamw_vector<G, C>(args, constants, squares[0], i);
  }
  if (i < end) {
    adamw_vector<G, C>(args, constants, squares[0], i, end - i);
  }
  float sums[4];
  Simd::sum4(squares, sums);
  return sums[0];
}

template <typename G>
float adamw(const AdamWArgs& args, int64_t begin, int64_t end) {
  if (args.copy == nullptr) {
    return adamw_span<G, void>(args, begin, end);
  }
  switch (args.copy_type) {
    case Scalar::kBFloat16:
      return adamw_span<G, BF16>(args, begin, end);
    case Scalar::kHalf:
      return adamw_span<G, Half>(args, begin, end);
    default:
      return adamw_span<G, float>(args, begin, end);
  }
}

template <typename G>
float squares(const void* numbers, int64_t begin, int64_t end) {
  const G* const data = static_cast<const G*>(numbers);
  Simd::Vec sums[4] = {Simd::set1(0.0f), Simd::set1(0.0f), Simd::set1(0.0f), Simd::set1(0.0f)};
  int64_t i = begin;
  for (; i + 4 * Simd::kLanes <= end; i += 4 * Simd::kLanes) {
    for (int64_t k = 0; k < 4; ++k) {
      const Simd::Vec value = Simd::load(data + i + k * Simd::kLanes);
      sums[k] = Simd::fma(value, value, sums[k]);
    }
  }
  for (int64_t n; i < end; i += n) {
    n = std::min<int64_t>(Simd::kLanes, end - i);
    const Simd::Vec value = Simd::load(data + i, n);
    sums[0] = Simd::fma(value, value, sums[0]);
  }
  float found[4];
  Simd::sum4(sums, found);
  return found[0] + found[1] + found[2] + found[3];
}

}  // namespace mlora::cpu::MLORA_ISA
