// Divides the output of deform_conv2d into pieces, because columns of all of it may take too much memory. Host C++.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace svexport::deform {

// Bytes of columns per piece: fewer are not worth the launches, more are not faster. Tests set a lower value.
#ifndef SVEXPORT_LEAST_COLUMNS
#define SVEXPORT_LEAST_COLUMNS (16 << 20)
#endif
constexpr int64_t kLeastColumns = SVEXPORT_LEAST_COLUMNS, kMostColumns = 8 * kLeastColumns;

// Output pixels: `rows` rows, from `row` on, of each of `images` images, from `first` on.
struct Piece {
  int64_t first, images, row, rows;
};

// The output, and how much memory its columns may take.
struct Columns {
  int64_t images, height, width;
  int64_t row;   // bytes of columns per row of the output
  int64_t more;  // bytes that a piece may take beyond those of all columns; negative if other buffers use them

  // Upper bound on the bytes of columns at a time. Together with other buffers, smaller outputs never use more.
  int64_t bytes() const {
    const int64_t all = images * height * row;
    return std::min(all, std::max(row, std::clamp(all + more, kLeastColumns, kMostColumns)));
  }

  // Covers all pixels with pieces as large as bytes() allows: whole images, or rows of one; the last piece is smaller.
  std::vector<Piece> pieces() const {
    std::vector<Piece> found;
    const int64_t fit = bytes() / std::max<int64_t>(row, 1);  // rows
    if (fit == 0) return found;
    // Columns of pieces begin at multiples of 16 bytes if those of images do.
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
