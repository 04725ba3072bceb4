// What the instructions of PTX do, on the lanes of a warp. Included by runtime.cpp.
#pragma once

template <class T, class F>
Run unary(F f) {
  return [f](Warp& w, const Instruction& i, uint32_t lanes) {
    each(lanes, [&](int l) { w.put(i.to[0], l, f(w.get<T>(i.from[0], l))); });
  };
}

template <class T, class F>
Run binary(F f) {
  return [f](Warp& w, const Instruction& i, uint32_t lanes) {
    each(lanes, [&](int l) { w.put(i.to[0], l, f(w.get<T>(i.from[0], l), w.get<T>(i.from[1], l))); });
  };
}

template <class T, class F>
Run ternary(F f) {
  return [f](Warp& w, const Instruction& i, uint32_t lanes) {
    each(lanes, [&](int l) {
      w.put(i.to[0], l, f(w.get<T>(i.from[0], l), w.get<T>(i.from[1], l), w.get<T>(i.from[2], l)));
    });
  };
}

Run nothing() {
  return [](Warp&, const Instruction&, uint32_t) {};
}

// A binary operation on halves or pairs of them by its one on float.
template <class F>
Run on_floats(Type type, F f) {
  const auto two = [&]<class T>(T) {
    return binary<uint32_t>([f](uint32_t x, uint32_t y) {
      const auto half = [&](int at) {
        const T z = static_cast<T>(f(static_cast<float>(from_bits<T>(x >> at)), static_cast<float>(from_bits<T>(y >> at))));
        return static_cast<uint32_t>(std::bit_cast<uint16_t>(z)) << at;
      };
      return half(0) | half(16);
    });
  };
  switch (type) {
    case Type::f16x2: return two(Half());
    case Type::bf16x2: return two(BFloat16());
    case Type::f16: return binary<Half>([f](Half x, Half y) { return static_cast<Half>(f(float(x), float(y))); });
    case Type::bf16: return binary<BFloat16>([f](BFloat16 x, BFloat16 y) { return BFloat16(f(float(x), float(y))); });
    case Type::f32: return binary<float>([f](float x, float y) { return static_cast<float>(f(x, y)); });
    case Type::f64: return binary<double>([f](double x, double y) { return static_cast<double>(f(x, y)); });
    default: fail("no floats");
  }
}

// x + y as a float that is not above it, or not below it.
float rounded(double x, double y, bool up) {
  const double sum = x + y, part = sum - x, rest = (x - (sum - part)) + (y - part);
  const float z = static_cast<float>(sum);
  if (!std::isfinite(sum)) return z;
  const bool wrong = up ? z < sum || (z == sum && rest > 0) : z > sum || (z == sum && rest < 0);
  return wrong ? std::nextafter(z, up ? INFINITY : -INFINITY) : z;
}

template <class T>
auto wide(T) {
  if constexpr (std::is_same_v<T, uint16_t>) return uint32_t();
  else if constexpr (std::is_same_v<T, int16_t>) return int32_t();
  else if constexpr (std::is_same_v<T, uint32_t>) return uint64_t();
  else if constexpr (std::is_same_v<T, int32_t>) return int64_t();
  else return T();
}

template <class T>
T high(T x, T y) {
  if constexpr (std::is_same_v<T, uint64_t>) {
    return static_cast<uint64_t>(static_cast<unsigned __int128>(x) * y >> 64);
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return static_cast<int64_t>(static_cast<__int128>(x) * y >> 64);
  } else {
    return static_cast<T>(static_cast<decltype(wide(T()))>(x) * y >> (8 * sizeof(T)));
  }
}

template <class T>
T low(T x, T y) {
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(static_cast<U>(static_cast<uint64_t>(static_cast<U>(x)) * static_cast<U>(y)));
}

template <class T>
T sum(T x, T y) {
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(static_cast<U>(static_cast<U>(x) + static_cast<U>(y)));
}

template <class T>
T difference(T x, T y) {
  using U = std::make_unsigned_t<T>;
  return static_cast<T>(static_cast<U>(static_cast<U>(x) - static_cast<U>(y)));
}

template <class T>
bool compare(const std::string& how, T x, T y) {
  bool unordered = false;
  if constexpr (kFloats<T>) {
    unordered = std::isnan(static_cast<double>(x)) || std::isnan(static_cast<double>(y));
    if (how == "num" || how == "nan") return unordered == (how == "nan");
    if (how.size() == 3) {  // equ, neu, ltu, leu, gtu, geu: true where one is NaN
      return unordered || compare<T>(how.substr(0, 2), x, y);
    }
    if (unordered) return false;
  }
  if (how == "eq") return x == y;
  if (how == "ne") return x != y;
  if (how == "lt" || how == "lo") return x < y;
  if (how == "le" || how == "ls") return x <= y;
  if (how == "gt" || how == "hi") return x > y;
  if (how == "ge" || how == "hs") return x >= y;
  fail("no comparison " + how);
}

template <class T>
Run comparison(const std::string& how, const std::string& combined) {
  const auto with = [&](auto holds) -> Run {
    return [holds, combined](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) {
        const bool r = holds(w.get<T>(i.from[0], l), w.get<T>(i.from[1], l));
        const bool c = i.from.size() > 2 && (w.get<uint8_t>(i.from[2], l) & 1);
        const auto both = [&](bool x) {
          return combined == "and" ? x && c : combined == "or" ? x || c : combined == "xor" ? x != c : x;
        };
        w.put<uint8_t>(i.to[0], l, both(r));
        if (i.to.size() > 1) w.put<uint8_t>(i.to[1], l, both(!r));
      });
    };
  };
  if constexpr (!kFloats<T>) {  // the usual ones without comparing strings
    if (how == "eq") return with([](T x, T y) { return x == y; });
    if (how == "ne") return with([](T x, T y) { return x != y; });
    if (how == "lt") return with([](T x, T y) { return x < y; });
    if (how == "le") return with([](T x, T y) { return x <= y; });
    if (how == "gt") return with([](T x, T y) { return x > y; });
    if (how == "ge") return with([](T x, T y) { return x >= y; });
  }
  return with([how](T x, T y) { return compare<T>(how, x, y); });
}

template <class To, class From>
To converted(From x, const std::string& rounding, bool saturated) {
  if constexpr (kFloats<From>) {
    double y = static_cast<double>(x);
    if (rounding == "rni") y = std::nearbyint(y);
    if (rounding == "rzi") y = std::trunc(y);
    if (rounding == "rmi") y = std::floor(y);
    if (rounding == "rpi") y = std::ceil(y);
    if constexpr (kFloats<To>) {
      if (saturated) y = std::isnan(y) ? 0 : std::clamp(y, 0.0, 1.0);
      if constexpr (sizeof(To) == 2 && std::is_same_v<From, float>) {
        if (rounding == "rz") {  // towards zero: not beyond what is rounded
          To z = static_cast<To>(static_cast<float>(y));
          if (std::abs(static_cast<double>(z)) > std::abs(y)) z = from_bits<To>(to_bits(z) - 1);
          return z;
        }
      }
      return static_cast<To>(static_cast<std::conditional_t<std::is_same_v<To, double>, double, float>>(y));
    } else {
      if (std::isnan(y)) return sizeof(From) == 8 || sizeof(To) == 8 ? static_cast<To>(1ull << 63) : To(0);
      const double least = static_cast<double>(std::numeric_limits<To>::min());
      if (y <= least) return std::numeric_limits<To>::min();
      if (y >= static_cast<double>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
      return static_cast<To>(y);
    }
  } else if constexpr (kFloats<To>) {
    return static_cast<To>(static_cast<std::conditional_t<std::is_same_v<To, double>, double, float>>(x));
  } else {
    if (saturated) {
      const auto y = static_cast<__int128>(x);
      return static_cast<To>(std::clamp<__int128>(y, std::numeric_limits<To>::min(), std::numeric_limits<To>::max()));
    }
    return static_cast<To>(x);
  }
}

enum class Space { generic, global, shared, local, parameter };

Space space_of(const std::vector<std::string>& parts) {
  for (const auto& p : parts) {
    if (p == "global" || p == "const") return Space::global;
    if (p.starts_with("shared")) return Space::shared;
    if (p == "local") return Space::local;
    if (p.starts_with("param")) return Space::parameter;
  }
  return Space::generic;
}

uint64_t tagged(Space space, uint64_t address) {
  if (address & ~(kShared - 1)) return address;  // a symbol, which has its tag
  const uint64_t low = address & 0xffffffffu;
  switch (space) {
    case Space::shared: return kShared | low;
    case Space::local: return kLocal | low;
    case Space::parameter: return kParameters | low;
    default: return address;
  }
}

// The address that operands `at` and `at + 1` make.
uint64_t address_of(const Warp& w, const Instruction& i, int at, Space space, int lane) {
  return tagged(space, w.bits(i.from[at], lane) + i.from[at + 1].number);
}

Run loads(Type type, Space space) {
  return with_type(type, [&]<class T>(T) -> Run {
    return [space](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) {
        T x[8];
        const size_t n = i.to.size();
        std::memcpy(static_cast<void*>(x), w.at(address_of(w, i, 0, space, l), n * sizeof(T), l, 'r'), n * sizeof(T));
        for (size_t k = 0; k < n; ++k) w.put(i.to[k], l, x[k]);
      });
    };
  });
}

Run stores(Type type, Space space) {
  return with_type(type, [&]<class T>(T) -> Run {
    return [space](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) {
        T x[8];
        const size_t n = i.from.size() - 2;
        for (size_t k = 0; k < n; ++k) x[k] = w.get<T>(i.from[2 + k], l);
        std::memcpy(w.at(address_of(w, i, 0, space, l), n * sizeof(T), l, 'w'), static_cast<void*>(x), n * sizeof(T));
      });
    };
  });
}

template <class T>
T changed(const std::string& how, T old, T x, T y) {
  if constexpr (!kFloats<T>) {
    if (how == "and") return old & x;
    if (how == "or") return old | x;
    if (how == "xor") return old ^ x;
    if (how == "inc") return old >= x ? T(0) : static_cast<T>(old + 1);
    if (how == "dec") return old == 0 || old > x ? x : static_cast<T>(old - 1);
    if (how == "add") return sum(old, x);
    if (how == "cas") return old == x ? y : old;
  } else {
    if (how == "add") return static_cast<T>(static_cast<std::conditional_t<sizeof(T) == 8, double, float>>(old) + x);
  }
  if (how == "min") return x < old ? x : old;
  if (how == "max") return x > old ? x : old;
  if (how == "exch") return x;
  fail("no atomic " + how);
}

// One lane after another. atom: to the old values; from: address, values.
Run atomics(const std::string& how, Type type, Space space, bool result, size_t count) {
  return with_type(type, [&]<class T>(T) -> Run {
    return [how, space, result, count](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) {
        T x[8];
        void* const at = w.at(address_of(w, i, 0, space, l), count * sizeof(T), l, 'a');
        std::memcpy(static_cast<void*>(x), at, count * sizeof(T));
        for (size_t k = 0; k < count; ++k) {
          const T old = x[k], y = w.get<T>(i.from[2 + k], l), z = how == "cas" ? w.get<T>(i.from[3], l) : T();
          x[k] = changed<T>(how, old, y, z);
          if (result) w.put(i.to[k], l, old);
        }
        std::memcpy(at, static_cast<void*>(x), count * sizeof(T));
      });
    };
  });
}

Run shuffles(const std::string& how) {
  return [how](Warp& w, const Instruction& i, uint32_t lanes) {
    std::array<uint32_t, kWarp> values{};
    each(lanes, [&](int l) { values[l] = w.get<uint32_t>(i.from[0], l); });
    each(lanes, [&](int l) {
      const int by = w.get<uint32_t>(i.from[1], l) & 31, c = w.get<uint32_t>(i.from[2], l);
      const int segment = c >> 8 & 31, first = l & segment, last = first | ((c & 31) & ~segment);
      int at = l;
      bool there = true;
      if (how == "up") at = l - by, there = at >= last;
      if (how == "down") at = l + by, there = at <= last;
      if (how == "bfly") at = l ^ by, there = at <= last;
      if (how == "idx") at = first | (by & ~segment), there = at <= last;
      if (!there) at = l;
      if (!(lanes >> at & 1)) fail("a shuffle from a lane that is not there");
      w.put(i.to[0], l, values[at]);
      if (i.to.size() > 1) w.put<uint8_t>(i.to[1], l, there);
    });
  };
}

Run votes(const std::string& how) {
  return [how](Warp& w, const Instruction& i, uint32_t lanes) {
    uint32_t ballot = 0;
    each(lanes, [&](int l) { ballot |= (w.get<uint8_t>(i.from[0], l) & 1u) << l; });
    const uint32_t result = how == "ballot" ? ballot
                            : how == "all"  ? ballot == lanes
                            : how == "any"  ? ballot != 0
                                            : ballot == 0 || ballot == lanes;
    each(lanes, [&](int l) { w.put(i.to[0], l, result); });
  };
}

Run reductions(const std::string& how, Type type) {
  return with_type(type, [&]<class T>(T) -> Run {
    if constexpr (std::is_integral_v<T>) {
      return [how](Warp& w, const Instruction& i, uint32_t lanes) {
        std::optional<T> all;
        each(lanes, [&](int l) {
          const T x = w.get<T>(i.from[0], l);
          all = all ? changed<T>(how, *all, x, T()) : x;
        });
        each(lanes, [&](int l) { w.put(i.to[0], l, *all); });
      };
    } else {
      fail("no reduction of floats");
    }
  });
}

void finish(Warp& w, const Copy& c) {
  uint8_t* const to = w.block->for_bytes(c.to & (kShared - 1), c.bytes, true, [&](Byte& b) {
    b.coming = false;
    w.block->note(b, w, c.lane, 'w');
    if (c.time) Block::wrote(b, w.thread(c.lane), c.time);
  });
  if (c.given) std::memcpy(to, w.at(c.from, c.given, c.lane, 'r', c.bytes), c.given);
  std::memset(to + c.given, 0, c.bytes - c.given);
}

void finish_copies(Warp& w, uint32_t lanes, int pending) {
  auto& copies = w.copies;
  const auto kept = std::remove_if(copies.begin(), copies.end(), [&](const Copy& c) {
    if (!(lanes >> c.lane & 1) || c.group >= w.commits[c.lane] - pending) return false;
    finish(w, c);
    return true;
  });
  copies.erase(kept, copies.end());
}

// Copies happen when they are waited for, as late as they may.
Run async_copies(const std::vector<std::string>& parts) {
  if (parts[2] == "commit_group") {
    return [](Warp& w, const Instruction&, uint32_t lanes) { each(lanes, [&](int l) { ++w.commits[l]; }); };
  }
  if (parts[2] == "wait_group" || parts[2] == "wait_all") {
    return [](Warp& w, const Instruction& i, uint32_t lanes) {
      finish_copies(w, lanes, i.from.empty() ? -1 : static_cast<int>(i.from[0].number));
    };
  }
  return [](Warp& w, const Instruction& i, uint32_t lanes) {
    each(lanes, [&](int l) {
      const int bytes = static_cast<int>(i.from[4].number);
      const int given = i.from.size() > 5 ? std::min<int>(bytes, w.get<uint32_t>(i.from[5], l)) : bytes;
      const uint64_t to = address_of(w, i, 0, Space::shared, l);
      w.at(to, bytes, l, 'w');
      w.block->for_bytes(to & (kShared - 1), bytes, true, [](Byte& b) { b.coming = true; });
      w.copies.push_back({l, w.commits[l], bytes, given, to, address_of(w, i, 2, Space::global, l),
                          w.copied++});
    });
  };
}

uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int k = 0; k < 4; ++k) {
    const uint32_t s = selector >> (4 * k) & 15, byte = bytes >> (8 * (s & 7)) & 0xff;
    result |= (s & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << (8 * k);
  }
  return result;
}

Run moves(const Instruction& i, Type type) {
  const int bits = 8 * (type == Type::pred ? 1 : size_of(type));
  if (i.to.size() > 1) {
    return [each_bits = bits / static_cast<int>(i.to.size())](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) {
        const uint64_t x = w.bits(i.from[0], l), mask = each_bits == 64 ? ~0ull : (1ull << each_bits) - 1;
        for (size_t k = 0; k < i.to.size(); ++k) w.put<uint64_t>(i.to[k], l, x >> (k * each_bits) & mask);
      });
    };
  }
  if (i.from.size() > 1) {
    return [each_bits = bits / static_cast<int>(i.from.size())](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) {
        uint64_t x = 0;
        for (size_t k = 0; k < i.from.size(); ++k) {
          x |= (w.bits(i.from[k], l) & ((1ull << each_bits) - 1)) << (k * each_bits);
        }
        w.put(i.to[0], l, x);
      });
    };
  }
  return [](Warp& w, const Instruction& i, uint32_t lanes) {
    each(lanes, [&](int l) { w.put(i.to[0], l, w.bits(i.from[0], l)); });
  };
}

// What `i`, whose operands are known, does; parts: of its name.
void build(Instruction& i, const std::vector<std::string>& parts) {
  const std::string& name = parts[0];
  const auto has = [&](const char* word) { return std::find(parts.begin(), parts.end(), word) != parts.end(); };
  std::vector<Type> types;
  for (const auto& p : parts) {
    if (const auto t = type_of(p)) types.push_back(*t);
  }
  const Type type = types.empty() ? Type::none : types.back();
  const bool floats = type == Type::f32 || type == Type::f64 || type == Type::f16 || type == Type::bf16 ||
                      type == Type::f16x2 || type == Type::bf16x2;
  const Space space = space_of(parts);
  const auto on_integers = [&](auto f) {
    return with_type(type, [&]<class T>(T) -> Run {
      if constexpr (std::is_integral_v<T>) return f(T());
      else fail("no integers");
    });
  };
  const auto by_float = [&](auto f) -> Run {  // of one number
    if (type == Type::f64) return unary<double>([f](double x) { return f(x); });
    if (type == Type::f16) return unary<Half>([f](Half x) { return static_cast<Half>(f(static_cast<float>(x))); });
    if (type == Type::bf16) return unary<BFloat16>([f](BFloat16 x) { return BFloat16(f(static_cast<float>(x))); });
    if (type != Type::f32) fail("not of this type");
    return unary<float>([f](float x) { return f(x); });
  };

  const bool arithmetic = name == "add" || name == "sub" || name == "mul" || name == "fma" || name == "div";
  const bool up = has("rp"), directed = arithmetic && (up || has("rm"));
  if ((directed && (type != Type::f32 || name == "div")) || (arithmetic && floats && (has("rz") || has("sat")))) {
    fail("unknown");
  }

  if (name == "mov") {
    i.run = moves(i, type);
  } else if (name == "ld" || name == "ldu") {
    i.run = loads(type, space);
  } else if (name == "st") {
    i.run = stores(type, space);
  } else if (name == "atom" || name == "red") {
    std::string how;
    size_t count = 1;
    for (const auto& p : parts) {
      for (const char* one : {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"}) {
        if (p == one) how = p;
      }
      if (p == "v2" || p == "v4" || p == "v8") count = p[1] - '0';
    }
    if (type == Type::f16x2 || type == Type::bf16x2) {
      i.run = [](Warp&, const Instruction&, uint32_t) { fail("atomics of pairs of halves are not emulated"); };
    } else {
      i.run = atomics(how, type, space, name == "atom", count);
    }
  } else if (name == "cvta") {
    const bool to = has("to");
    i.run = [space, to](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) {
        const uint64_t x = w.bits(i.from[0], l);
        w.put(i.to[0], l, space == Space::global ? x : to ? x & 0xffffffffu : tagged(space, x));
      });
    };
  } else if (name == "add" || name == "sub" || (name == "mul" && floats)) {
    if (floats && directed) {
      i.run = binary<float>([name, up](float x, float y) {
        if (name == "mul") return rounded(static_cast<double>(x) * y, 0, up);
        return rounded(x, name == "add" ? y : -y, up);
      });
    } else if (floats) {
      if (name == "add") i.run = on_floats(type, [](auto x, auto y) { return x + y; });
      if (name == "sub") i.run = on_floats(type, [](auto x, auto y) { return x - y; });
      if (name == "mul") i.run = on_floats(type, [](auto x, auto y) { return x * y; });
    } else {
      i.run = on_integers([&]<class T>(T) -> Run { return name == "add" ? binary<T>(sum<T>) : binary<T>(difference<T>); });
    }
  } else if (name == "mul") {
    i.run = on_integers([&]<class T>(T) -> Run {
      if (has("wide")) return binary<T>([](T x, T y) { return static_cast<decltype(wide(T()))>(x) * y; });
      return has("hi") ? binary<T>(high<T>) : binary<T>(low<T>);
    });
  } else if (name == "fma" || (name == "mad" && floats)) {
    if (directed) {
      i.run = ternary<float>([up](float x, float y, float z) { return rounded(static_cast<double>(x) * y, z, up); });
    } else if (type == Type::f32) {
      i.run = ternary<float>([](float x, float y, float z) { return std::fma(x, y, z); });
    } else if (type == Type::f64) {
      i.run = ternary<double>([](double x, double y, double z) { return std::fma(x, y, z); });
    } else {
      const auto halves = [&]<class T>(T, int count) -> Run {
        return ternary<uint32_t>([count](uint32_t x, uint32_t y, uint32_t z) {
          uint32_t result = 0;
          for (int at = 0; at < 16 * count; at += 16) {
            const auto f = [&](uint32_t v) { return static_cast<double>(from_bits<T>(v >> at)); };
            const T one = static_cast<T>(static_cast<float>(std::fma(f(x), f(y), f(z))));
            result |= static_cast<uint32_t>(std::bit_cast<uint16_t>(one)) << at;
          }
          return result;
        });
      };
      const int count = type == Type::f16x2 || type == Type::bf16x2 ? 2 : 1;
      i.run = type == Type::f16 || type == Type::f16x2 ? halves(Half(), count) : halves(BFloat16(), count);
    }
  } else if (name == "mad") {
    i.run = on_integers([&]<class T>(T) -> Run {
      if (has("wide")) {
        using W = decltype(wide(T()));
        return [](Warp& w, const Instruction& i, uint32_t lanes) {
          each(lanes, [&](int l) {
            const W product = static_cast<W>(w.get<T>(i.from[0], l)) * w.get<T>(i.from[1], l);
            w.put(i.to[0], l, sum<W>(product, w.get<W>(i.from[2], l)));
          });
        };
      }
      if (has("hi")) return ternary<T>([](T x, T y, T z) { return sum<T>(high<T>(x, y), z); });
      return ternary<T>([](T x, T y, T z) { return sum<T>(low<T>(x, y), z); });
    });
  } else if (name == "div") {
    if (floats) {
      i.run = on_floats(type, [](auto x, auto y) { return x / y; });
    } else {
      i.run = on_integers([&]<class T>(T) -> Run {
        return binary<T>([](T x, T y) { return y == 0 ? static_cast<T>(~T(0)) : static_cast<T>(x / y); });
      });
    }
  } else if (name == "rem") {
    i.run = on_integers([&]<class T>(T) -> Run {
      return binary<T>([](T x, T y) { return y == 0 ? x : static_cast<T>(x % y); });
    });
  } else if (name == "neg" || name == "abs") {
    const bool negative = name == "neg";
    if (type == Type::f16x2 || type == Type::bf16x2) {
      i.run = unary<uint32_t>([negative](uint32_t x) { return negative ? x ^ 0x80008000u : x & 0x7fff7fffu; });
    } else if (floats) {
      i.run = with_type(type, [&]<class T>(T) -> Run {
        return unary<Bits<T>>([negative](Bits<T> x) -> Bits<T> {
          const auto sign = static_cast<Bits<T>>(Bits<T>(1) << (8 * sizeof(T) - 1));
          return negative ? x ^ sign : x & static_cast<Bits<T>>(~sign);
        });
      });
    } else {
      i.run = on_integers([&]<class T>(T) -> Run {
        return unary<T>([negative](T x) { return negative || x < T(0) ? difference<T>(0, x) : x; });
      });
    }
  } else if (name == "min" || name == "max") {
    const bool least = name == "min", nan = has("NaN");
    if (floats) {
      i.run = on_floats(type, [least, nan](auto x, auto y) {
        if (std::isnan(x) || std::isnan(y)) return nan ? std::numeric_limits<decltype(x)>::quiet_NaN() : std::isnan(x) ? y : x;
        if (x == y) return least == std::signbit(x) ? x : y;  // -0 is less than 0
        return (x < y) == least ? x : y;
      });
    } else {
      i.run = on_integers([&]<class T>(T) -> Run {
        return binary<T>([least](T x, T y) { return least ? std::min(x, y) : std::max(x, y); });
      });
    }
  } else if (name == "and" || name == "or" || name == "xor") {
    if (name == "and") i.run = binary<uint64_t>([](uint64_t x, uint64_t y) { return x & y; });
    if (name == "or") i.run = binary<uint64_t>([](uint64_t x, uint64_t y) { return x | y; });
    if (name == "xor") i.run = binary<uint64_t>([](uint64_t x, uint64_t y) { return x ^ y; });
  } else if (name == "not") {
    i.run = type == Type::pred ? unary<uint64_t>([](uint64_t x) { return ~x & 1; })
                               : unary<uint64_t>([](uint64_t x) { return ~x; });
  } else if (name == "shl" || name == "shr") {
    const bool left = name == "shl";
    i.run = on_integers([&]<class T>(T) -> Run {
      return [left](Warp& w, const Instruction& i, uint32_t lanes) {
        each(lanes, [&](int l) {
          const T x = w.get<T>(i.from[0], l);
          const uint32_t n = w.get<uint32_t>(i.from[1], l), most = 8 * sizeof(T) - 1;
          if (left) {
            w.put(i.to[0], l, n > most ? T(0) : static_cast<T>(static_cast<std::make_unsigned_t<T>>(x) << n));
          } else {
            w.put(i.to[0], l, n > most ? (x < T(0) ? static_cast<T>(-1) : T(0)) : static_cast<T>(x >> n));
          }
        });
      };
    });
  } else if (name == "shf") {
    const bool left = has("l"), wrap = has("wrap");
    i.run = ternary<uint32_t>([left, wrap](uint32_t a, uint32_t b, uint32_t c) {
      const uint32_t n = wrap ? c & 31 : std::min(c, 32u);
      const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
      return static_cast<uint32_t>(left ? both << n >> 32 : both >> n);
    });
  } else if (name == "lop3") {
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      const auto table = static_cast<uint32_t>(i.from[3].number);
      each(lanes, [&](int l) {
        const uint32_t a = w.get<uint32_t>(i.from[0], l), b = w.get<uint32_t>(i.from[1], l), c = w.get<uint32_t>(i.from[2], l);
        uint32_t result = 0;
        for (int k = 0; k < 8; ++k) {
          if (table >> k & 1) result |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
        }
        w.put(i.to[0], l, result);
      });
    };
  } else if (name == "prmt") {
    if (parts[1] != "b32" || parts.size() > 2) fail("unknown");
    i.run = ternary<uint32_t>(permuted);
  } else if (name == "dp2a") {  // of signed numbers: two of 16 bits, two of the four bytes
    const int first = has("hi") ? 16 : 0;
    i.run = ternary<uint32_t>([first](uint32_t a, uint32_t b, uint32_t c) {
      for (int k = 0; k < 2; ++k) {
        c += static_cast<uint32_t>(static_cast<int16_t>(a >> 16 * k) * static_cast<int8_t>(b >> (first + 8 * k)));
      }
      return c;
    });
  } else if (name == "bfe") {
    i.run = on_integers([&]<class T>(T) -> Run {
      return ternary<T>([](T x, T p, T n) {
        const uint32_t at = p & 255, length = n & 255, bits = 8 * sizeof(T);
        using U = std::make_unsigned_t<T>;
        if (length == 0) return T(0);
        U y = at >= bits ? (x < T(0) ? static_cast<U>(~U(0)) : U(0)) : static_cast<U>(x >> at);
        if (length >= bits) return static_cast<T>(y);
        const uint32_t up = bits - length;
        return std::is_signed_v<T> ? static_cast<T>(static_cast<T>(y << up) >> up) : static_cast<T>(static_cast<U>(y << up) >> up);
      });
    });
  } else if (name == "bfi") {
    i.run = on_integers([&]<class T>(T) -> Run {
      return [](Warp& w, const Instruction& i, uint32_t lanes) {
        each(lanes, [&](int l) {
          const T f = w.get<T>(i.from[0], l), x = w.get<T>(i.from[1], l);
          const uint32_t at = w.get<uint32_t>(i.from[2], l) & 255, length = w.get<uint32_t>(i.from[3], l) & 255;
          T mask = 0;
          for (uint32_t k = at; k < at + length && k < 8 * sizeof(T); ++k) mask |= static_cast<T>(T(1) << k);
          w.put(i.to[0], l, static_cast<T>((x & ~mask) | ((at < 8 * sizeof(T) ? f << at : 0) & mask)));
        });
      };
    });
  } else if (name == "bfind") {
    const bool shift = has("shiftamt");
    i.run = on_integers([&]<class T>(T) -> Run {
      return unary<T>([shift](T x) {
        using U = std::make_unsigned_t<T>;
        const U u = x < T(0) ? static_cast<U>(~x) : static_cast<U>(x);
        const int bits = 8 * sizeof(T), first = bits - 1 - std::countl_zero(u);
        return u == 0 ? ~0u : static_cast<uint32_t>(shift ? bits - 1 - first : first);
      });
    });
  } else if (name == "brev") {
    i.run = on_integers([&]<class T>(T) -> Run {
      return unary<T>([](T x) {
        T y = 0;
        for (size_t k = 0; k < 8 * sizeof(T); ++k) y |= static_cast<T>(T(x >> k & 1) << (8 * sizeof(T) - 1 - k));
        return y;
      });
    });
  } else if (name == "clz" || name == "popc") {
    const bool ones = name == "popc";
    i.run = type == Type::u64 ? unary<uint64_t>([ones](uint64_t x) -> uint32_t { return ones ? std::popcount(x) : std::countl_zero(x); })
                              : unary<uint32_t>([ones](uint32_t x) -> uint32_t { return ones ? std::popcount(x) : std::countl_zero(x); });
  } else if (name == "selp") {
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) { w.put(i.to[0], l, w.bits(i.from[w.get<uint8_t>(i.from[2], l) & 1 ? 0 : 1], l)); });
    };
  } else if (name == "setp") {
    std::string combined;
    for (const char* one : {"and", "or", "xor"}) {
      if (has(one)) combined = one;
    }
    i.run = with_type(type, [&]<class T>(T) -> Run { return comparison<T>(parts[1], combined); });
  } else if (name == "cvt" && i.from.size() > 1) {  // of two floats to a pair of halves
    const bool half = types.front() == Type::f16x2;
    if (!half && types.front() != Type::bf16x2) fail("unknown");
    i.run = binary<float>([half](float x, float y) {
      const auto bits = [&](float v) -> uint32_t {
        return half ? std::bit_cast<uint16_t>(static_cast<Half>(v)) : BFloat16(v).bits;
      };
      return bits(x) << 16 | bits(y);
    });
  } else if (name == "cvt") {
    std::string rounding;
    for (const char* one : {"rni", "rzi", "rmi", "rpi", "rz"}) {
      if (has(one)) rounding = one;
    }
    if (has("satfinite") || has("relu") || has("rm") || has("rp")) fail("unknown");
    const bool saturated = has("sat");
    i.run = with_type(types.at(0), [&]<class To>(To) -> Run {
      return with_type(types.at(1), [&]<class From>(From) -> Run {
        return unary<From>([rounding, saturated](From x) { return converted<To, From>(x, rounding, saturated); });
      });
    });
  } else if (name == "rcp") {
    i.run = by_float([](auto x) { return 1 / x; });
  } else if (name == "sqrt") {
    i.run = by_float([](auto x) { return std::sqrt(x); });
  } else if (name == "rsqrt") {
    i.run = by_float([](auto x) { return 1 / std::sqrt(x); });
  } else if (name == "ex2") {
    i.run = by_float([](auto x) { return std::exp2(x); });
  } else if (name == "lg2") {
    i.run = by_float([](auto x) { return std::log2(x); });
  } else if (name == "sin") {
    i.run = by_float([](auto x) { return std::sin(x); });
  } else if (name == "cos") {
    i.run = by_float([](auto x) { return std::cos(x); });
  } else if (name == "tanh") {
    i.run = by_float([](auto x) { return std::tanh(x); });
  } else if (name == "shfl") {
    i.kind = Kind::together;
    i.members = i.from.back();
    i.run = shuffles(parts[2]);
  } else if (name == "vote") {
    i.kind = Kind::together;
    i.members = i.from.back();
    i.run = votes(parts[2]);
  } else if (name == "match") {
    i.kind = Kind::together;
    i.members = i.from.back();
    if (parts[1] != "any") fail("unknown");
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      std::array<uint64_t, kWarp> values{};
      each(lanes, [&](int l) { values[l] = w.get<uint32_t>(i.from[0], l); });
      each(lanes, [&](int l) {
        uint32_t same = 0;
        each(lanes, [&](int other) { same |= static_cast<uint32_t>(values[other] == values[l]) << other; });
        w.put(i.to[0], l, same);
      });
    };
  } else if (name == "redux") {
    i.kind = Kind::together;
    i.members = i.from.back();
    i.run = reductions(parts[2], type);
  } else if (name == "activemask") {
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) { w.put(i.to[0], l, lanes); });
    };
  } else if ((name == "bar" || name == "barrier") && has("warp")) {
    i.kind = Kind::together;
    i.members = i.from.at(0);
    i.run = [](Warp& w, const Instruction&, uint32_t lanes) { w.synchronize(lanes); };
  } else if ((name == "bar" || name == "barrier") && !has("cluster")) {
    i.kind = Kind::barrier;
    i.waits = !has("arrive");
    i.reduction = has("red") ? has("popc") ? 1 : has("and") ? 2 : 3 : 0;
  } else if (name == "cp" && !has("bulk")) {
    i.run = async_copies(parts);
  } else if (name == "membar" || name == "fence" || name == "griddepcontrol" || name == "nanosleep" || name == "prefetch") {
    i.run = nothing();
  } else {
    fail("unknown");
  }
}
