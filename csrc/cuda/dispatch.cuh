// From a dtype and a rank to the template that serves them: the narrowest panel that holds the rank, or the
// widest there is.
#pragma once

#include "cuda/kernels.h"
#include "cuda/numbers.h"

namespace mlora::cuda {

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// f(T{}, Constant<panel width>{})
template <typename Function>
int for_panel(Scalar type, int ranks, Function&& f) {
  if (type == Scalar::kFloat) {
    return ranks <= 16 ? f(0.0f, Constant<16>{}) : f(0.0f, Constant<kFloatRanks>{});
  }
  const auto with = [&](auto number) {
    return ranks <= 16   ? f(number, Constant<16>{})
           : ranks <= 32 ? f(number, Constant<32>{})
           : ranks <= 64 ? f(number, Constant<64>{})
                         : f(number, Constant<kTensorRanks>{});
  };
  return type == Scalar::kHalf ? with(Half{}) : with(BFloat16{});
}

}  // namespace mlora::cuda
