// From a dtype and a rank to the template that serves them: the narrowest panel that holds the rank, or the
// widest there is.
#pragma once

#include <type_traits>

#include "cuda/primitives.cuh"

namespace mlora::cuda {

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Whether programs of panels of kRanks take the width of their adapter's own ranks, where it is narrower. In
// bf16 only: every width is one more body of a kernel.
template <typename T, int kRanks>
constexpr bool kNarrows = std::is_same_v<T, BFloat16> && (kRanks > 16);

// f(Constant<width>{}) of the narrowest panel, of at most kMost ranks, that holds an adapter's own ranks.
template <typename T, bool kAligned, int kMost, typename Function>
__device__ inline void for_own_width(int ranks, Function&& f) {
  if constexpr (!kAligned || !kNarrows<T, kMost>) {
    f(Constant<kMost>{});
  } else if (ranks > kMost / 2) {
    f(Constant<kMost>{});
  } else {
    for_own_width<T, kAligned, kMost / 2>(ranks, f);
  }
}

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
