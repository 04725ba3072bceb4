#include "tactics.h"

#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>

namespace svexport {
namespace {

std::atomic<bool> any{false};
std::mutex mutex;

std::map<std::string, int32_t>& forced() {
  static auto* const all = new std::map<std::string, int32_t>;
  return *all;
}

// Of this process, for gradients are computed by other threads.
void force(const std::string& op, int64_t tactic) {
  const std::lock_guard<std::mutex> lock(mutex);
  forced()[op] = static_cast<int32_t>(tactic);
  any = true;
}

}  // namespace

int32_t forced_tactic(const char* op) {
  if (!any) return 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = forced().find(op);
  return found == forced().end() ? 0 : found->second;
}

TORCH_LIBRARY_FRAGMENT(svexport, m) { m.def("_force_tactic(str op, int tactic) -> ()", &force); }

}  // namespace svexport
