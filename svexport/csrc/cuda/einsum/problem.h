// What is asked of the kernels of einsum. Host C++, no CUDA.
#pragma once

#include <cstdint>

namespace svexport::einsum {

struct Figures;

// Three tensors that share dimensions in pairs: x (S, O, K, T, V) and z (S, O, M, T, W), both large, and y (S, K, V, M, W),
// small; y or z is what is asked for. Where S, V and W are 1, K and M are channels, and T positions.
struct Problem {
  static constexpr const char* kOp = "einsum";
  using Figures = einsum::Figures;
  int32_t sums = 0;  // whether y is asked for, the sum of x z over O and T; else z, that of x y over K and V
  int64_t shared = 1, outer = 1, rows = 1;  // S, O, T
  int64_t x_count = 1, x_width = 1;         // K, V
  int64_t z_count = 1, z_width = 1;         // M, W
  int32_t item_size = 4;
  int32_t whole = 0;    // whether every 32 rows of x and z begin and end at multiples of 16 bytes
  int32_t pairs = 0;    // whether every two neighbours of their rows lie within the same 4 bytes
  int32_t aligned = 1;  // positions, 4 at most, at a multiple of whose bytes as many begin

  template <class Visitor>
  void each(Visitor&& visit) {
    visit("sums", sums);
    visit("shared", shared);
    visit("outer", outer);
    visit("rows", rows);
    visit("x_count", x_count);
    visit("x_width", x_width);
    visit("z_count", z_count);
    visit("z_width", z_width);
    visit("item_size", item_size);
    visit("whole", whole);
    visit("pairs", pairs);
    visit("aligned", aligned);
  }
};

}  // namespace svexport::einsum
