// Figures of the planners' cost functions, by GPU. Host C++, no CUDA.
#pragma once

#include <array>
#include <cstring>

#include "planner.h"
#include "tuning.h"

namespace svexport {

// The table of the GPU whose name begins like this one; the first, of any GPU, where there is none.
inline int32_t table_of(const char* name) {
  for (int i = 1; i < kTables; ++i) {
    if (std::strncmp(name, kTunedGpus[i], std::strlen(kTunedGpus[i])) == 0) return i;
  }
  return 0;
}

// Sets the figures that a table has of an op.
template <class Figures>
void read_table(int table, const char* op, Figures& figures) {
  figures.each([&](const char* prefix, const char* name, auto& values) {
    const size_t length = std::strlen(prefix);
    for (const Tuned& row : kTuned) {
      if (row.table != table || std::strcmp(row.op, op) != 0) continue;
      if (std::strncmp(row.name, prefix, length) != 0 || std::strcmp(row.name + length, name) != 0) continue;
      for (size_t i = 0; i < sizeof(values) / sizeof(*values); ++i) values[i] = row.values[i];
    }
  });
}

// The figures of an op on a GPU. What its table does not have is that of any GPU.
template <class Figures>
const Figures& tuned(const char* op, const Gpu& gpu) {
  static const std::array<Figures, kTables> all = [op] {
    Figures any{};
    read_table(0, op, any);
    std::array<Figures, kTables> tables;
    tables.fill(any);
    for (int table = 1; table < kTables; ++table) read_table(table, op, tables[table]);
    return tables;
  }();
  return all[gpu.table > 0 && gpu.table < kTables ? gpu.table : 0];
}

}  // namespace svexport
