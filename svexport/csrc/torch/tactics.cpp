#include <atomic>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "binding.h"
#include "gpu.h"

namespace svexport {
namespace {

std::atomic<bool> any{false};
std::mutex mutex;

std::map<std::string, int32_t>& forced() {
  static auto* const all = new std::map<std::string, int32_t>;
  return *all;
}

// For the whole process, because other threads compute gradients.
void force(const std::string& op, int64_t tactic) {
  const std::lock_guard<std::mutex> lock(mutex);
  forced()[op] = static_cast<int32_t>(tactic);
  any = true;
}

std::vector<std::string>& asked() {
  static auto* const all = new std::vector<std::string>;
  return *all;
}

void note(const char* op, const int64_t* numbers, int count) {
  std::string line = op;
  for (int i = 0; i < count; ++i) line += ' ' + std::to_string(numbers[i]);
  const std::lock_guard<std::mutex> lock(mutex);
  asked().push_back(std::move(line));
}

// Turns watching on or off. Returns the problems that tactics were chosen for since the last call: op and numbers.
std::vector<std::string> watch_problems(bool on) {
  watcher = on ? &note : nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  return std::exchange(asked(), {});
}

// Adds winners for the current device. Each line has an op, the numbers of a problem, and the tactic.
void add_winners(const std::vector<std::string>& lines) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Winners* known = winners;
  auto* const all = known ? new Winners(*known) : new Winners;
  const Gpu gpu = current_gpu();
  for (const std::string& line : lines) {
    std::istringstream words(line);
    std::string op;
    words >> op;
    Few<int64_t> numbers;
    int64_t last = 0;
    words >> last;
    for (int64_t next = 0; words >> next; last = next) numbers.add(last);
    (*all)[key_of(op.c_str(), numbers, gpu)] = static_cast<int32_t>(last);
  }
  winners = all;
}

}  // namespace

int32_t forced_tactic(const char* op) {
  if (!any) return 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = forced().find(op);
  return found == forced().end() ? 0 : found->second;
}

TORCH_LIBRARY_FRAGMENT(svexport, m) {
  m.def("_force_tactic(str op, int tactic) -> ()", &force);
  m.def("_watch_problems(bool on) -> str[]", &watch_problems);
  m.def("_add_winners(str[] lines) -> ()", &add_winners);
}

}  // namespace svexport
