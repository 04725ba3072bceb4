// Constants of the planners' cost functions per GPU, and the choice of a tactic. Host C++, no CUDA.
#pragma once

#include <array>
#include <atomic>
#include <cstring>
#include <unordered_map>

#include "planner.h"
#include "tuning.h"

namespace svexport {

// The table whose GPU's name is a prefix of `name`; 0, the table of any GPU, if there is none.
inline int32_t table_of(const char* name) {
  for (int i = 1; i < kTables; ++i) {
    if (std::strncmp(name, kTunedGpus[i], std::strlen(kTunedGpus[i])) == 0) return i;
  }
  return 0;
}

// Sets the figures of an op that a table has; leaves the others.
template <class Figures>
void read_table(int table, const char* op, Figures& figures) {
  figures.each([&](const char* name, auto& values) {
    for (const Tuned& row : kTuned) {
      if (row.table != table || std::strcmp(row.op, op) != 0 || std::strcmp(row.name, name) != 0) continue;
      for (size_t i = 0; i < sizeof(values) / sizeof(*values); ++i) values[i] = row.values[i];
    }
  });
}

// The figures for a problem on a GPU. Those that its table lacks come from the table of any GPU.
template <class Problem, class Figures = typename Problem::Figures>
const Figures& tuned(const Gpu& gpu) {
  static const std::array<Figures, kTables> all = [] {
    Figures any{};
    read_table(0, Problem::kOp, any);
    std::array<Figures, kTables> tables;
    tables.fill(any);
    for (int table = 1; table < kTables; ++table) read_table(table, Problem::kOp, tables[table]);
    return tables;
  }();
  return all[gpu.table > 0 && gpu.table < kTables ? gpu.table : 0];
}

// A function that gives the cost of a problem's tactics in microseconds.
template <class Problem>
auto costs_of(const Problem& problem, const Gpu& gpu) {
  return [&problem, &gpu, &figures = tuned<Problem>(gpu)](const auto& t) { return cost(problem, t, gpu, figures); };
}

// If set, it is called for every problem that a tactic is chosen for, with the op and the numbers in the order of
// Problem::each. The tuner uses it to learn the problem of some tensors, whose tactics it then times.
using Watcher = void (*)(const char* op, const int64_t* numbers, int count);
inline std::atomic<Watcher> watcher{nullptr};

// The tactics measured to be the fastest, by the key of a problem on a GPU; null: none are known. Maps are never freed,
// because launches on other threads read them.
using Winners = std::unordered_map<uint64_t, int32_t>;
inline std::atomic<const Winners*> winners{nullptr};

inline uint64_t key_of(const char* op, const Few<int64_t>& numbers, const Gpu& gpu) {
  uint64_t key = 14695981039346656037u;  // FNV's offset basis
  const auto add = [&](uint64_t number) { key = (key ^ number) * 1099511628211u; };
  for (; *op; ++op) add(*op);
  for (const int64_t number : numbers) add(number);
  for (const int32_t number : {gpu.capability, gpu.multiprocessors, gpu.shared_memory, gpu.l2_megabytes}) add(number);
  add(static_cast<uint64_t>(gpu.bandwidth));
  return key;
}

// Calls the watcher and returns the id of the winner, or 0.
template <class Problem>
int32_t winner_of(Problem problem, const Gpu& gpu) {
  const Watcher told = watcher.load(std::memory_order_relaxed);
  const Winners* known = winners.load(std::memory_order_acquire);
  if (!told && !known) return 0;
  Few<int64_t> numbers;
  problem.each([&](const char*, auto value) { numbers.add(static_cast<int64_t>(value)); });
  if (told) told(Problem::kOp, numbers.begin(), numbers.size());
  if (!known) return 0;
  const auto found = known->find(key_of(Problem::kOp, numbers, gpu));
  return found == known->end() ? 0 : found->second;
}

// The tactic for a problem: `forced` if it is valid, else the winner, else the cheapest.
template <class Problem>
auto choose(const Problem& problem, const Gpu& gpu, int32_t forced) {
  const int32_t winner = winner_of(problem, gpu);
  return cheapest(tactics(problem, gpu), forced ? forced : winner, costs_of(problem, gpu));
}

// The ids of the tactics worth timing, which cost at most twice the cheapest. Empty if there is only one.
template <class Problem>
Few<int32_t> worth_timing(const Problem& problem, const Gpu& gpu) {
  const auto all = tactics(problem, gpu);
  const auto costs = costs_of(problem, gpu);
  const double least = all.size() ? costs(cheapest(all, 0, costs)) : 0;
  Few<int32_t> ids;
  for (const auto& tactic : all) {
    if (costs(tactic) <= 2 * least) ids.add(tactic.id());
  }
  return ids.size() > 1 ? ids : Few<int32_t>();
}

}  // namespace svexport
