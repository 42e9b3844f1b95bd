// The frozen products of a call with the low-rank parts inside, where each of its layers is served so.
#pragma once

#include "cuda/call.h"
#include "cuda/hopper_product.h"

namespace mlora::cuda {

class OwnProducts {
 public:
  // `group` as in ProductArguments; 0: none is wanted.
  OwnProducts(const Call& call, const FactorTable& factor, bool forward, int64_t group,
              const uint32_t* keep = nullptr)
      : call_(call),
        keep_(keep),
        forward_(forward),
        group_(static_cast<int>(group)),
        serve_(group > 0 && call.parts.starts != nullptr && has_product(call.queue)) {
    pages_.type = call.type;
    pages_.factor = factor;
    pages_.pitch = 16 * ceil_div(call.ranks, 16);
  }

  // Whether all layers that were added are served.
  bool serve() const { return serve_; }

  // The next layer. Backward adds its dx to that of the layers before.
  void add(const Tensor& rows, const Tensor& weight, const Tensor& out, const void* s, const void* bias) {
    ProductArguments& own = products_[static_cast<size_t>(pages_.layers)];
    const int columns = static_cast<int>(out.size(1));
    own.type = call_.type;
    own.forward = forward_;
    own.add = !forward_ && pages_.layers > 0;
    own.rows = rows_of(rows);
    own.weight = rows_of(weight);
    own.weight.aligned = own.weight.aligned && weight.stride(1) == 1;
    own.out = out_rows_of(out);
    own.bias = bias;
    own.parts = call_.parts;
    own.s = {s, call_.ranks, is_aligned(s, call_.ranks, 2)};
    own.factor = {{nullptr, columns, columns % 8 == 0},
                  pages_.factor.rows + pages_.layers * call_.adapters,
                  static_cast<int32_t>(call_.adapters),
                  pages_.pitch};
    own.dropout = call_.dropout;
    if (own.dropout.layers != nullptr) {
      own.dropout.layers += pages_.layers;
    }
    if (keep_ != nullptr) {
      own.keep = keep_ + pages_.layers * call_.rows * ceil_div(call_.columns, kWordColumns);
    }
    own.rows_total = call_.rows;
    own.d_in = static_cast<int>(weight.size(1));
    own.d_out = static_cast<int>(weight.size(0));
    own.ranks = static_cast<int>(call_.ranks);
    own.cluster = call_.rows > kProductRows ? 2 : 1;
    own.group = group_;
    serve_ = serve_ && serves_product(own, call_.queue) &&
             2 * call_.adapters * pages_.pitch * columns <= kMostPageBytes;
    pages_.out[pages_.layers++] = {nullptr, columns};
  }

  // Fills the pages of factors. They live as long as this.
  void fill_pages(const Tensor& like) {
    const int64_t page_rows = call_.adapters * pages_.pitch;
    int64_t numbers = 0;
    for (int i = 0; i < pages_.layers; ++i) {
      numbers += page_rows * pages_.out[i].columns;
    }
    memory_ = empty_like_device(like, {numbers}, call_.dtype);
    char* next = static_cast<char*>(memory_->mutable_data_ptr());
    for (int i = 0; i < pages_.layers; ++i) {
      products_[static_cast<size_t>(i)].factor.rows.data = pages_.out[i].data = next;
      next += 2 * page_rows * pages_.out[i].columns;
    }
    check_launch(call_.queue, launch_pages(pages_, call_.queue), "page");
  }

  // Makes the products. Multiprocessors that are left run what another queue launches meanwhile.
  void launch(int64_t left = 0) {
    for (int i = 0; i < pages_.layers; ++i) {
      ProductArguments& own = products_[static_cast<size_t>(i)];
      own.left = static_cast<int>(left);
      check_launch(call_.queue, launch_product(own, call_.queue), "product");
    }
  }

 private:
  // A batch of many adapters, of which few have large ranks, would need much memory for padding.
  static constexpr int64_t kMostPageBytes = 256 << 20;

  const Call& call_;
  const uint32_t* keep_;
  bool forward_;
  int group_;
  bool serve_;
  PageArguments pages_ = {};
  std::array<ProductArguments, kMostLayers> products_ = {};
  OptionalTensor memory_;
};

}  // namespace mlora::cuda
