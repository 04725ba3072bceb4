// The planners behind a C interface, for Python: which tactics there are, what they would cost, which one is chosen.
// Numbers go in, JSON comes out. There is no CUDA in it: any C++17 compiler makes a library of it.
#include <cstdio>
#include <string>
#include <type_traits>

#include "add_bias_residual_layer_norm/tactics.h"
#include "camera_sample/tactics.h"
#include "deform_conv2d/tactics.h"
#include "einsum/tactics.h"
#include "grid_sample/gradient.h"
#include "grid_sample/tactics.h"
#include "ms_deform_attn/tactics.h"
#include "tuned.h"

namespace svexport {
namespace {

class Json {
 public:
  std::string text;

  void open(const char* key, char bracket) { name(key), text += bracket, first_ = true; }
  void close(char bracket) { text += bracket, first_ = false; }
  void put(const char* key, const char* value) { name(key), text += '"', text += value, text += '"'; }
  void put(const char* key, bool value) { name(key), text += value ? "true" : "false"; }
  void put(const char* key, double value) {
    char digits[40];
    std::snprintf(digits, sizeof(digits), "%.9g", value);
    name(key), text += digits;
  }
  template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
  void put(const char* key, T value) { name(key), text += std::to_string(value); }
  template <class T, class = std::enable_if_t<std::is_enum_v<T>>, class = void>
  void put(const char* key, T value) { put(key, name_of(value)); }

 private:
  void name(const char* key) {
    if (!first_) text += ", ";
    first_ = false;
    if (key) text += '"', text += key, text += "\": ";
  }
  bool first_ = true;
};

void put(Json& json, const Launch& l) {
  json.open("launch", '{');
  json.put("work", l.work), json.put("per_block", l.per_block), json.put("most", l.most);
  json.open("grid", '['), json.put(nullptr, l.blocks()), json.put(nullptr, l.grid_y), json.put(nullptr, l.grid_z);
  json.close(']');
  json.open("block", '[');
  for (int threads : l.block) json.put(nullptr, threads);
  json.close(']');
  json.put("shared_memory", l.shared_memory);
  json.close('}');
}

// Calls f with a problem of each op that has a planner.
template <class F>
void each_problem(F&& f) {
  f(norm::Problem()), f(camera::Problem()), f(deform::Problem()), f(einsum::Problem());
  f(sampler::Problem()), f(sampler::gradient::Problem()), f(ms_deform::Problem());
}

// Plans one op. `numbers` are its problem, in the order of Problem::each.
template <class Problem>
std::string plan(Problem problem, const int64_t* numbers, int count, const Gpu& gpu) {
  int given = 0;
  problem.each([&](const char*, auto& value) {
    if (given < count) value = static_cast<std::decay_t<decltype(value)>>(numbers[given]);
    ++given;
  });
  if (given != count) return {};
  const auto all = tactics(problem, gpu);
  const auto costs = costs_of(problem, gpu);
  Json json;
  json.open(nullptr, '{');
  json.put("chosen", all.size() ? cheapest(all, 0, costs).id() : 0);
  json.open("tactics", '[');
  for (const auto& tactic : all) {
    json.open(nullptr, '{');
    json.put("id", tactic.id());
    json.put("microseconds", costs(tactic));
    json.open("constants", '{');
    tactic.each([&](const char* name, auto value) { json.put(name, value); });
    json.close('}');
    put(json, launch(problem, tactic, gpu));
    json.close('}');
  }
  json.close(']');
  json.close('}');
  return json.text;
}

int written(const std::string& text, char* out, int size) {
  if (static_cast<int>(text.size()) < size) std::memcpy(out, text.c_str(), text.size() + 1);
  return static_cast<int>(text.size());
}

}  // namespace
}  // namespace svexport

#define EXPORT extern "C" __attribute__((visibility("default")))

// Both functions return the length of the JSON and write it if `size` is larger. 0: there is no such op.

// The problem of each op: names in order, with their default values.
EXPORT int svexport_problems(char* out, int size) {
  using namespace svexport;
  Json json;
  json.open(nullptr, '{');
  each_problem([&](auto problem) {
    json.open(problem.kOp, '{');
    problem.each([&](const char* name, auto value) { json.put(name, value); });
    json.close('}');
  });
  json.close('}');
  return written(json.text, out, size);
}

// gpu_name: the name that the device reports.
EXPORT int svexport_plan(const char* op, const int64_t* numbers, int count, const svexport::Gpu* gpu,
                         const char* gpu_name, char* out, int size) {
  using namespace svexport;
  Gpu known = *gpu;
  known.table = table_of(gpu_name);
  std::string text;
  each_problem([&](auto problem) {
    if (!std::strcmp(op, problem.kOp)) text = plan(problem, numbers, count, known);
  });
  return written(text, out, size);
}
