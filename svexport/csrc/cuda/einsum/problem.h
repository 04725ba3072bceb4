// What is asked of the kernels of einsum. Host C++, no CUDA.
#pragma once

#include <cstdint>

#include "fields.h"

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

  SVEXPORT_EACH(sums, shared, outer, rows, x_count, x_width, z_count, z_width, item_size, whole, pairs, aligned)
};

}  // namespace svexport::einsum
