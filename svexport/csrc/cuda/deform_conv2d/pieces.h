// The pieces that an output of deform_conv2d is made in: columns of all of it may take too much memory. Host C++.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace svexport::deform {

// Bytes of columns at a time: fewer are not worth the launches, more are not faster. Tests have less of both.
#ifndef SVEXPORT_LEAST_COLUMNS
#define SVEXPORT_LEAST_COLUMNS (16 << 20)
#endif
constexpr int64_t kLeastColumns = SVEXPORT_LEAST_COLUMNS, kMostColumns = 8 * kLeastColumns;

// Output pixels: `rows` rows, from `row` on, of each of `images` images, from `first` on.
struct Piece {
  int64_t first, images, row, rows;
};

// The output, and what its columns may take.
struct Columns {
  int64_t images, height, width;
  int64_t row;   // bytes of the columns of a row
  int64_t more;  // bytes at a time beyond those of all columns; negative for what there is beside them

  // At most, at a time. With what is beside them, no more for smaller outputs.
  int64_t bytes() const {
    const int64_t all = images * height * row;
    return std::min(all, std::max(row, std::clamp(all + more, kLeastColumns, kMostColumns)));
  }

  // All pixels, in pieces as large as that allows, the last of them what is left: of images, or of rows of one.
  std::vector<Piece> pieces() const {
    std::vector<Piece> found;
    const int64_t fit = bytes() / std::max<int64_t>(row, 1);  // rows
    if (fit == 0) return found;
    // Columns of pieces begin at multiples of 16 bytes where those of images do.
    const int64_t aligned = 8 / std::gcd<int64_t>(8, width), step = fit < aligned ? 1 : aligned;
    const int64_t together = std::max<int64_t>(fit / height, 1), rows = fit < height ? fit / step * step : height;
    for (int64_t first = 0; first < images; first += together) {
      for (int64_t y = 0; y < height; y += rows) {
        found.push_back({first, std::min(together, images - first), y, std::min(rows, height - y)});
      }
    }
    return found;
  }
};

}  // namespace svexport::deform
