// What the host writes, as JSON.
#pragma once

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <vector>

#include "NvInfer.h"
#include "NvInferVersion.h"
#include "NvOnnxParser.h"
using namespace nvinfer1;
#define TRT (NV_TENSORRT_MAJOR * 100 + NV_TENSORRT_MINOR)
#if TRT >= 1000
#define V3 1
#else
#define V3 0
#endif
#if TRT >= 1000
using DimsArgument = Dims const&;
#else
using DimsArgument = Dims;
#endif
constexpr int64_t kUnknown = INT64_MIN;  // an unknown element of a shape tensor
using Shape = std::vector<int64_t>;
using ShapeValues = std::optional<std::vector<int64_t>>;

std::string quoted(std::string const& s) {
  std::string r = "\"";
  char b[8];
  for (unsigned char c : s) {
    if (c == '"' || c == '\\') {
      r += '\\';
      r += c;
    } else if (c < 32 || c > 126) {
      snprintf(b, 8, "\\u%04x", c);
      r += b;
    } else r += c;
  }
  return r + "\"";
}
void writeKey(std::ostream& o, char const* k) { o << ',' << quoted(k) << ':'; }
template <class T, std::enable_if_t<std::is_enum_v<T>, int> = 0>
void writeField(std::ostream& o, char const* k, T v) {
  writeKey(o, k);
  o << (int64_t)v;
}
template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
void writeField(std::ostream& o, char const* k, T v) {
  writeKey(o, k);
  o << (int64_t)v;
}
void writeField(std::ostream& o, char const* k, double v) {
  writeKey(o, k);
  if (std::isfinite(v)) o << v;
  else o << quoted(std::to_string(v));
}
void writeField(std::ostream& o, char const* k, std::string const& v) {
  writeKey(o, k);
  o << quoted(v);
}
template <class V>
void writeArray(std::ostream& o, V const* p, int64_t n) {
  o << '[';
  for (int64_t i = 0; i < n; i++) o << (i ? "," : "") << (double)p[i];
  o << ']';
}
void writeField(std::ostream& o, char const* k, Dims const& v) {
  writeKey(o, k);
  if (v.nbDims < 0) o << "null";
  else writeArray(o, v.d, v.nbDims);
}
void writeField(std::ostream& o, char const* k, Permutation const& v) {
  writeKey(o, k);
  writeArray(o, v.order, 8);
}
bool withData = false;
void writeField(std::ostream& o, char const* k, Weights const& v) {
  static int const bits[] = {32, 16, 8, 32, 8, 8, 8, 16, 64, 4};
  writeKey(o, k);
  o << "{\"type\":" << (int)v.type << ",\"count\":" << v.count;
  if (withData && v.values) {
    o << ",\"hex\":\"";
    auto* p = (unsigned char const*)v.values;
    char b[3];
    for (int64_t i = 0, n = (v.count * bits[(int)v.type] + 7) / 8; i < n; i++) {
      snprintf(b, 3, "%02x", p[i]);
      o << b;
    }
    o << '"';
  }
  o << '}';
}
template <class T>
void writeField(std::ostream& o, char const* k, std::vector<T> const& v) {
  writeKey(o, k);
  writeArray(o, v.data(), v.size());
}
