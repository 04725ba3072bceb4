// Whether choices are winners where there are some, and only there. Exits with what does not hold.
#include <cstdio>

#include "add_bias_residual_layer_norm/tactics.h"
#include "tuned.h"

using namespace svexport;

namespace {

Few<int64_t> told;

Few<int64_t> numbers_of(norm::Problem problem) {
  Few<int64_t> numbers;
  problem.each([&](const char*, auto value) { numbers.add(value); });
  return numbers;
}

void watch(const char*, const int64_t* numbers, int count) {
  told = {};
  for (int i = 0; i < count; ++i) told.add(numbers[i]);
}

#define HOLDS(what) \
  if (!(what)) return std::fprintf(stderr, "line %d: not so: %s\n", __LINE__, #what), 1;

}  // namespace

int main() {
  norm::Problem problem, larger;
  problem.rows = 900, problem.columns = 256;
  larger = problem;
  larger.rows = 901;
  Gpu gpu, other;
  gpu.capability = 90, gpu.multiprocessors = 132;
  other = gpu;
  other.multiprocessors = 131;
  const auto all = norm::tactics(problem, gpu);
  const int32_t usual = choose(problem, gpu, 0).id();
  int32_t winner = 0, forced = 0;
  for (const auto& tactic : all) {
    if (tactic.id() != usual) forced = winner, winner = tactic.id();
  }
  HOLDS(winner && forced)
  Winners known{{key_of("add_bias_residual_layer_norm", numbers_of(problem), gpu), winner}};
  winners = &known;
  HOLDS(choose(problem, gpu, 0).id() == winner)
  HOLDS(choose(problem, gpu, forced).id() == forced)
  HOLDS(choose(problem, other, 0).id() == usual)
  HOLDS(choose(larger, gpu, 0).id() == usual)
  watcher = &watch;
  HOLDS(choose(problem, gpu, 0).id() == winner)
  HOLDS(told.size() == numbers_of(problem).size() && told[1] == 900)
  known.begin()->second = 12345;  // no tactic, as of another version
  HOLDS(choose(problem, gpu, 0).id() == usual)
}
