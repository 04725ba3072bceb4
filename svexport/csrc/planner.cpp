// The planners behind a C interface, for Python: which tactics there are, what they would cost, which is chosen. Numbers
// go in, JSON comes out. No CUDA: any C++17 compiler makes a library of it.
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

// One op: its problem as numbers in the order of Problem::each.
template <class Problem, class Figures>
std::string plan(const char* op, const int64_t* numbers, int count, const Gpu& gpu) {
  Problem problem;
  int given = 0;
  problem.each([&](const char*, auto& value) {
    if (given < count) value = static_cast<std::decay_t<decltype(value)>>(numbers[given]);
    ++given;
  });
  if (given != count) return {};
  const Figures& figures = tuned<Figures>(op, gpu);
  const auto all = tactics(problem, gpu);
  const auto costs = [&](const auto& tactic) { return cost(problem, tactic, gpu, figures); };
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

template <class Problem>
void describe(Json& json, const char* op) {
  json.open(op, '{');
  Problem().each([&](const char* name, auto value) { json.put(name, value); });
  json.close('}');
}

int written(const std::string& text, char* out, int size) {
  if (static_cast<int>(text.size()) < size) std::memcpy(out, text.c_str(), text.size() + 1);
  return static_cast<int>(text.size());
}

}  // namespace
}  // namespace svexport

#define EXPORT extern "C" __attribute__((visibility("default")))

// Both return the length of the JSON, which is written if `size` is more than that; 0: there is no such op.

// What a problem of each op is made of: names in order, and what holds where nothing is said.
EXPORT int svexport_problems(char* out, int size) {
  using namespace svexport;
  Json json;
  json.open(nullptr, '{');
  describe<norm::Problem>(json, "add_bias_residual_layer_norm");
  describe<camera::Problem>(json, "camera_sample");
  describe<deform::Problem>(json, "deform_conv2d");
  describe<einsum::Problem>(json, "einsum");
  describe<sampler::Problem>(json, "grid_sample");
  describe<sampler::gradient::Problem>(json, "grid_sample_backward");
  describe<ms_deform::Problem>(json, "ms_deform_attn");
  json.close('}');
  return written(json.text, out, size);
}

// gpu_name: as the device calls itself.
EXPORT int svexport_plan(const char* op, const int64_t* numbers, int count, const svexport::Gpu* gpu,
                         const char* gpu_name, char* out, int size) {
  using namespace svexport;
  Gpu known = *gpu;
  known.table = table_of(gpu_name);
  if (!std::strcmp(op, "add_bias_residual_layer_norm")) {
    return written(plan<norm::Problem, norm::Figures>(op, numbers, count, known), out, size);
  }
  if (!std::strcmp(op, "camera_sample")) {
    return written(plan<camera::Problem, camera::Figures>(op, numbers, count, known), out, size);
  }
  if (!std::strcmp(op, "deform_conv2d")) {
    return written(plan<deform::Problem, deform::Figures>(op, numbers, count, known), out, size);
  }
  if (!std::strcmp(op, "einsum")) {
    return written(plan<einsum::Problem, einsum::Figures>(op, numbers, count, known), out, size);
  }
  if (!std::strcmp(op, "grid_sample")) {
    return written(plan<sampler::Problem, sampler::Figures>(op, numbers, count, known), out, size);
  }
  if (!std::strcmp(op, "grid_sample_backward")) {
    return written(plan<sampler::gradient::Problem, sampler::gradient::Figures>(op, numbers, count, known), out, size);
  }
  if (!std::strcmp(op, "ms_deform_attn")) {
    return written(plan<ms_deform::Problem, ms_deform::Figures>(op, numbers, count, known), out, size);
  }
  return 0;
}
