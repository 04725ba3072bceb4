// Lists the members of a struct with their names. Host C++, no CUDA.
#pragma once

#include <string>
#include <vector>

namespace svexport {

// Splits "a, b" into a and b.
inline std::vector<std::string> names_of(const std::string& list) {
  std::vector<std::string> names(1);
  for (const char c : list) {
    if (c == ',') {
      names.emplace_back();
    } else if (c != ' ') {
      names.back() += c;
    }
  }
  return names;
}

}  // namespace svexport

// SVEXPORT_EACH(a, b) defines each(visit), const and not, which calls visit("a", a) and visit("b", b).
#define SVEXPORT_EACH_(QUALIFIER, ...)                                                         \
  template <class Visitor>                                                                     \
  void each(Visitor&& visit) QUALIFIER {                                                       \
    static const std::vector<std::string> names = svexport::names_of(#__VA_ARGS__);            \
    auto name = names.begin();                                                                 \
    [&](auto&... members) { (visit((name++)->c_str(), members), ...); }(__VA_ARGS__);          \
  }
#define SVEXPORT_EACH(...) SVEXPORT_EACH_(, __VA_ARGS__) SVEXPORT_EACH_(const, __VA_ARGS__)
