// From a dtype and a rank to the template that serves them: the narrowest panel that holds the rank, or the
// widest there is.
#pragma once

#include <type_traits>

#include "cuda/kernels.h"
#include "cuda/numbers.h"

namespace mlora::cuda {

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// f(T{}, Constant<panel width>{}, std::bool_constant<aligned>{})
template <typename Function>
int for_panel(Scalar type, int ranks, bool aligned, Function&& f) {
  const auto with_width = [&](auto number, auto width) {
    return aligned ? f(number, width, std::true_type{}) : f(number, width, std::false_type{});
  };
  if (type == Scalar::kFloat) {
    return ranks <= 16 ? with_width(0.0f, Constant<16>{}) : with_width(0.0f, Constant<kFloatRanks>{});
  }
  const auto with = [&](auto number) {
    return ranks <= 16   ? with_width(number, Constant<16>{})
           : ranks <= 32 ? with_width(number, Constant<32>{})
           : ranks <= 64 ? with_width(number, Constant<64>{})
                         : with_width(number, Constant<kTensorRanks>{});
  };
  return type == Scalar::kHalf ? with(Half{}) : with(BFloat16{});
}

}  // namespace mlora::cuda
