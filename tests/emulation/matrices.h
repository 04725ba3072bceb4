// What products of matrices need beside the usual instructions: fragments, barriers in shared memory, copies by the
// engine. Included by runtime.cpp.
#pragma once

// D (16 x 8) = A (16 x K) B (K x 8) + C. Lane = 4 * group + pair; a register has `Each` neighbours along K.
template <int K, int Each, class F>
Run products(F element) {
  constexpr int kBlocks = K / (4 * Each);  // registers of B; A has twice as many
  return [element](Warp& w, const Instruction& i, uint32_t lanes) {
    if (lanes != ~0u) fail("lanes are missing");
    float a[16][K], b[K][8];
    double c[16][8];
    for (int l = 0; l < kWarp; ++l) {
      const int group = l / 4, pair = l % 4;
      for (int r = 0; r < 2 * kBlocks; ++r) {
        for (int e = 0; e < Each; ++e) {
          const int k = (r / 2 * 4 + pair) * Each + e;
          a[group + r % 2 * 8][k] = element(w.get<uint32_t>(i.from[r], l) >> (16 * e));
        }
      }
      for (int r = 0; r < kBlocks; ++r) {
        for (int e = 0; e < Each; ++e) {
          b[(r * 4 + pair) * Each + e][group] = element(w.get<uint32_t>(i.from[2 * kBlocks + r], l) >> (16 * e));
        }
      }
      for (int r = 0; r < 4; ++r) c[group + r / 2 * 8][pair * 2 + r % 2] = w.get<float>(i.from[3 * kBlocks + r], l);
    }
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < K; ++k) {
        for (int column = 0; column < 8; ++column) c[row][column] += static_cast<double>(a[row][k]) * b[k][column];
      }
    }
    for (int l = 0; l < kWarp; ++l) {
      for (int r = 0; r < 4; ++r) w.put(i.to[r], l, static_cast<float>(c[l / 4 + r / 2 * 8][l % 4 * 2 + r % 2]));
    }
  };
}

Run products(const std::string& shape, const std::string& types) {
  const auto half = [](uint32_t x) { return static_cast<float>(from_bits<Half>(x & 0xffff)); };
  const auto bfloat = [](uint32_t x) { return std::bit_cast<float>(x << 16); };
  const auto tf32 = [](uint32_t x) { return std::bit_cast<float>(x & 0xffffe000u); };
  if (types == "f32.f16.f16.f32" && shape == "m16n8k16") return products<16, 2>(half);
  if (types == "f32.f16.f16.f32" && shape == "m16n8k8") return products<8, 2>(half);
  if (types == "f32.bf16.bf16.f32" && shape == "m16n8k16") return products<16, 2>(bfloat);
  if (types == "f32.bf16.bf16.f32" && shape == "m16n8k8") return products<8, 2>(bfloat);
  if (types == "f32.tf32.tf32.f32" && shape == "m16n8k8") return products<8, 1>(tf32);
  if (types == "f32.tf32.tf32.f32" && shape == "m16n8k4") return products<4, 1>(tf32);
  fail("unknown");
}

// Matrices of 8 x 8 elements of 16 bits, of which each lane has two neighbours: lane i gives the address of row i % 8 of
// matrix i / 8.
Run load_matrices(bool transposed, Space space) {
  return [transposed, space](Warp& w, const Instruction& i, uint32_t lanes) {
    if (lanes != ~0u) fail("lanes are missing");
    uint16_t x[4][8][8];
    const int count = static_cast<int>(i.to.size());
    for (int l = 0; l < 8 * count; ++l) std::memcpy(x[l / 8][l % 8], w.at(address_of(w, i, 0, space, l), 16, l, 'r'), 16);
    for (int l = 0; l < kWarp; ++l) {
      for (int m = 0; m < count; ++m) {
        const int row = l / 4, column = l % 4 * 2;
        const uint32_t low = transposed ? x[m][column][row] : x[m][row][column];
        const uint32_t high = transposed ? x[m][column + 1][row] : x[m][row][column + 1];
        w.put(i.to[m], l, high << 16 | low);
      }
    }
  };
}

// What this thread knows of, the copy engine may know of too.
void publish(Warp& w, uint32_t lanes) {
  if (!w.block->function.has_engine) return;
  const int count = w.block->known;
  const auto copy = [&](Clock& to, const Clock& from) {
    for (int k = 0; k < count && !from.empty(); ++k) to[count + k] = std::max(to[count + k], from[k]);
  };
  const bool all = !(w.alive & ~lanes);
  if (all) copy(w.known, w.known);
  each(lanes, [&](int l) {
    auto& more = w.more[l];
    if (!all) {
      more.resize(2 * count);
      copy(more, w.known);
    }
    copy(more, more);
    w.known[count + w.thread(l)] = w.time;  // of this lane's own
  });
  ++w.time;
}

// Whether the copy engine may do what a thread asks it to with a byte.
void check_published(const Byte& b, const Warp& w, int lane) {
  const int threads = w.block->known - kEngines;
  if (b.writer < 0 || b.writer >= threads || w.knows(lane, w.block->known + b.writer, b.written)) return;
  fail("a copy by the engine without a fence.proxy.async behind what a thread has written");
}

// ---------------------------------------------------------------------------------------------- barriers in memory

MemoryBarrier& barrier_at(Warp& w, uint64_t address, int lane) {
  w.at(address, 8, lane, 'a');
  const auto found = w.block->memory_barriers.find(address);
  if (found == w.block->memory_barriers.end()) fail("there is no barrier");
  return found->second;
}

void end_phase(Block& block, MemoryBarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  if (!barrier.copies.empty()) fail("a copy of more bytes than its barrier expects");
  ++barrier.phase;
  barrier.arrived[barrier.engine] = barrier.phase;
  barrier.done = barrier.arrived;
  barrier.pending = barrier.count;
  ++block.events;
}

void arrive_at(Warp& w, MemoryBarrier& barrier, int lane, uint32_t count) {
  if (count > barrier.pending) fail("more arrivals than the barrier counts in a phase");
  barrier.pending -= count;
  w.release(1u << lane, barrier.arrived);
  ++w.block->events;
  end_phase(*w.block, barrier);
}

// Whether a phase has ended. What has been copied for it comes now, when the rest has.
bool has_ended(Warp& w, MemoryBarrier& barrier, uint32_t parity) {
  if (barrier.pending && barrier.pending == barrier.late.size()) {
    for (const LateArrival& a : std::exchange(barrier.late, {})) {
      std::erase_if(a.warp->copies, [&](const Copy& c) {
        if (c.lane != a.lane || c.order >= a.order) return false;
        finish(*a.warp, c);
        return true;
      });
      join(barrier.arrived, a.clock);
      --barrier.pending;
    }
    end_phase(*w.block, barrier);
  }
  if (!barrier.pending) {
    for (const Copy& c : std::exchange(barrier.copies, {})) {
      uint8_t* const to = w.block->for_bytes(c.to & (kShared - 1), c.bytes, true, [&](Byte& b) {
        b.coming = false;
        Block::wrote(b, barrier.engine, barrier.phase + 1);
      });
      std::memcpy(to, reinterpret_cast<const void*>(c.from), c.bytes);
      barrier.bytes -= c.bytes;
    }
    end_phase(*w.block, barrier);
  }
  return (barrier.phase & 1) != (parity & 1);
}

Run memory_barriers(const std::vector<std::string>& parts) {
  const auto has = [&](const char* word) { return std::find(parts.begin(), parts.end(), word) != parts.end(); };
  // The shared memory of this block may be named as that of its cluster.
  const auto at = [](Warp& w, const Instruction& i, int lane) { return address_of(w, i, 0, Space::shared, lane); };
  if (parts[1] == "init") {
    return [at](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) {
        auto& all = w.block->memory_barriers;
        const uint64_t address = at(w, i, l);
        w.at(address, 8, l, 'w');
        const auto [found, fresh] = all.try_emplace(address);
        const int first = w.block->known - kEngines;
        if (fresh) found->second.engine = first + static_cast<int>(all.size()) - 1;
        if (all.size() > kEngines) fail("more barriers in shared memory than are emulated");
        MemoryBarrier& barrier = found->second;
        if (!barrier.copies.empty()) fail("a copy for this barrier is under way");
        barrier.count = barrier.pending = w.get<uint32_t>(i.from[2], l);
        barrier.phase += barrier.phase & 1;  // an even one, but none that has been
        barrier.bytes = 0;
        if (barrier.count == 0) fail("a barrier that counts nothing");
      });
    };
  }
  if (parts[1] == "expect_tx") {
    return [at](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) { barrier_at(w, at(w, i, l), l).bytes += w.get<uint32_t>(i.from[2], l); });
    };
  }
  if (parts[1] == "arrive") {
    if (has("noComplete")) fail("unknown");
    return [at, expects = has("expect_tx")](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) {
        MemoryBarrier& barrier = barrier_at(w, at(w, i, l), l);
        const uint32_t number = i.from.size() > 2 ? w.get<uint32_t>(i.from[2], l) : 1;
        if (expects) barrier.bytes += number;
        if (!i.to.empty()) w.put<uint64_t>(i.to[0], l, barrier.phase);
        arrive_at(w, barrier, l, expects ? 1 : number);
      });
    };
  }
  if (parts[1] == "test_wait" || parts[1] == "try_wait") {  // of a state: the phase that it was, its parity is enough
    return [at](Warp& w, const Instruction& i, uint32_t lanes) {
      bool any = false;
      each(lanes, [&](int l) {
        MemoryBarrier& barrier = barrier_at(w, at(w, i, l), l);
        const bool ended = has_ended(w, barrier, w.get<uint32_t>(i.from[2], l));
        w.put<uint8_t>(i.to[0], l, ended);
        any |= ended;
      });
      w.yields = !any;
      // At once for lanes that have waited for the same, as they do.
      std::map<uint64_t, uint32_t> ended;
      each(lanes, [&](int l) {
        if (w.get<uint8_t>(i.to[0], l)) ended[at(w, i, l)] |= 1u << l;
      });
      for (const auto& [address, of] : ended) w.acquire(of, w.block->memory_barriers.at(address).done);
    };
  }
  if (parts[1] == "inval") {
    return [at](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) { w.at(at(w, i, l), 8, l, 'w'); });
    };
  }
  fail("unknown");
}

// cp.async.mbarrier.arrive.noinc
Run late_arrivals() {
  return [](Warp& w, const Instruction& i, uint32_t lanes) {
    each(lanes, [&](int l) {
      MemoryBarrier& barrier = barrier_at(w, address_of(w, i, 0, Space::shared, l), l);
      if (barrier.late.size() >= barrier.pending) fail("more arrivals than the barrier counts in a phase");
      for (Copy& c : w.copies) {
        if (c.lane == l && !c.time) c.time = w.time;
      }
      LateArrival& late = barrier.late.emplace_back(LateArrival{&w, l, w.copied, {}});
      w.release(1u << l, late.clock);
      ++w.block->events;
    });
  };
}

// ---------------------------------------------------------------------------------------------- wgmma

// C (64 x N) = A B or, where the predicate holds, += A B: 16 rows of each of four warps, as of mma, by columns of 32 bytes
// in shared memory, which are read until the product is waited for. A warp's rows are its own matter.
template <int K, class F>
Run wide_products(F element) {
  return [element](Warp& w, const Instruction& i, uint32_t lanes) {
    if (lanes != ~0u) fail("lanes are missing");
    constexpr int kEach = K / 8, kSize = 32 / K;  // elements of a register; bytes of one
    const int columns = static_cast<int>(i.to.size()) * 2;
    const uint64_t matrix = w.bits(i.from[4], 0);
    if (matrix >> 62) fail("a matrix that is swizzled is not emulated, and is an unknown");
    const uint64_t begin = (matrix & 0x3fff) << 4, leading = (matrix >> 16 & 0x3fff) << 4, stride = (matrix >> 32 & 0x3fff) << 4;
    float a[16][K], b[K][256];
    for (int column = 0; column < columns; ++column) {
      for (int piece = 0; piece < 2; ++piece) {
        const uint64_t at = begin + piece * leading + column / 8 * stride + column % 8 * 16;
        const uint8_t* const from = w.block->for_bytes(at, 16, false, [&](Byte& byte) {
          w.block->check(byte, w, 0, 'r');
          check_published(byte, w, 0);
          ++byte.going;
        });
        w.multiplied.emplace_back(at, 16);
        for (int e = 0; e < K / 2; ++e) {
          uint32_t bits = 0;
          std::memcpy(&bits, from + e * kSize, kSize);
          b[piece * K / 2 + e][column] = element(bits);
        }
      }
    }
    for (int l = 0; l < kWarp; ++l) {
      for (int r = 0; r < 4; ++r) {
        for (int e = 0; e < kEach; ++e) {
          a[l / 4 + r % 2 * 8][(r / 2 * 4 + l % 4) * kEach + e] = element(w.get<uint32_t>(i.from[r], l) >> (16 * e));
        }
      }
    }
    const bool adds = w.get<uint8_t>(i.from[5], 0) & 1;
    for (int l = 0; l < kWarp; ++l) {
      for (size_t r = 0; r < i.to.size(); ++r) {
        const int row = l / 4 + static_cast<int>(r) / 2 % 2 * 8, column = static_cast<int>(r) / 4 * 8 + l % 4 * 2 + r % 2;
        double sum = adds ? w.get<float>(i.to[r], l) : 0.0;
        for (int k = 0; k < K; ++k) sum += static_cast<double>(a[row][k]) * b[k][column];
        w.put(i.to[r], l, static_cast<float>(sum));
      }
    }
  };
}

Run wide_products(const std::vector<std::string>& parts, const Instruction& i) {
  if (parts[1] == "fence" || parts[1] == "commit_group") return nothing();
  if (parts[1] == "wait_group") {
    return [](Warp& w, const Instruction& i, uint32_t) {
      if (i.from.at(0).number) fail("products that are not waited for at once are an unknown");
      for (const auto& [at, bytes] : std::exchange(w.multiplied, {})) {
        w.block->for_bytes(at, bytes, false, [&](Byte& b) {
          --b.going;
          w.block->note(b, w, 0, 'r');
        });
      }
    };
  }
  if (parts.at(1) != "mma_async" || i.from.size() < 8 || i.from[6].number != 1 || i.from[7].number != 1) fail("unknown");
  const std::string types = parts.at(5) + "." + parts.at(6) + "." + parts.at(7);
  if (types == "f32.f16.f16") return wide_products<16>([](uint32_t x) { return static_cast<float>(from_bits<Half>(x & 0xffff)); });
  if (types == "f32.bf16.bf16") return wide_products<16>([](uint32_t x) { return std::bit_cast<float>(x << 16); });
  if (types == "f32.tf32.tf32") return wide_products<8>([](uint32_t x) { return std::bit_cast<float>(x & 0xffffe000u); });
  fail("unknown");
}

// ---------------------------------------------------------------------------------------------- the copy engine

// A copy begins and ends where 16 bytes do.
int bulk_bytes(const Warp& w, const Instruction& i, int lane) {
  const auto bytes = w.get<uint32_t>(i.from[4], lane);
  if (bytes % 16) fail("a copy by the engine of bytes that are not a multiple of 16");
  return static_cast<int>(bytes);
}

void check_aligned(uint64_t address) {
  if (address % 16) fail("an access that is not aligned");
}

Run bulk_copies(const std::vector<std::string>& parts) {
  const auto has = [&](const char* word) { return std::find(parts.begin(), parts.end(), word) != parts.end(); };
  if (has("commit_group")) {
    return [](Warp& w, const Instruction&, uint32_t lanes) { each(lanes, [&](int l) { ++w.put_commits[l]; }); };
  }
  if (has("wait_group")) {  // what has been read may be written over, whether or not it has been written
    return [](Warp& w, const Instruction& i, uint32_t lanes) {
      const int pending = static_cast<int>(i.from[0].number);
      std::erase_if(w.puts, [&](const Copy& c) {
        if (!(lanes >> c.lane & 1) || c.group >= w.put_commits[c.lane] - pending) return false;
        w.block->for_bytes(c.from & (kShared - 1), c.bytes, false, [](Byte& b) { --b.going; });
        std::memcpy(reinterpret_cast<void*>(c.to), w.block->shared_at(c.from & (kShared - 1), c.bytes, w, c.lane, 'r'),
                    c.bytes);
        return true;
      });
    };
  }
  if (has("prefetch")) return nothing();
  if (parts[3].starts_with("shared") && parts[4] == "global" && has("mbarrier::complete_tx::bytes")) {
    return [](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) {
        const int bytes = bulk_bytes(w, i, l);
        const uint64_t to = address_of(w, i, 0, Space::shared, l), from = address_of(w, i, 2, Space::global, l);
        check_aligned(to);
        check_aligned(from);
        check_global(from, bytes);
        MemoryBarrier& barrier = barrier_at(w, address_of(w, i, 5, Space::shared, l), l);
        w.block->for_bytes(to & (kShared - 1), bytes, true, [&](Byte& b) {
          w.block->check(b, w, l, 'w');
          check_published(b, w, l);
          b.coming = true;
          b.filled = false;
          b.readers.clear();
        });
        barrier.copies.push_back({l, 0, bytes, bytes, to, from});
      });
    };
  }
  if (parts[3] == "global" && parts[4].starts_with("shared") && has("bulk_group")) {
    return [](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) {
        const int bytes = bulk_bytes(w, i, l);
        const uint64_t to = address_of(w, i, 0, Space::global, l), from = address_of(w, i, 2, Space::shared, l);
        check_aligned(to);
        check_aligned(from);
        check_global(to, bytes);
        w.block->for_bytes(from & (kShared - 1), bytes, false, [&](Byte& b) {
          if (!b.filled) fail("a read of shared memory that nobody has written");
          w.block->check(b, w, l, 'r');
          check_published(b, w, l);
          ++b.going;
        });
        w.puts.push_back({l, w.put_commits[l], bytes, bytes, to, from});
      });
    };
  }
  fail("unknown");
}

// Whether `i` is one of these.
bool build_matrices(Instruction& i, const std::vector<std::string>& parts) {
  const std::string& name = parts[0];
  const auto has = [&](const char* word) { return std::find(parts.begin(), parts.end(), word) != parts.end(); };
  if (name == "mma" || name == "ldmatrix" || name == "elect") {
    i.kind = Kind::together;
    i.members = name == "elect" ? i.from.at(0) : Operand{-1, ~0u};
    if (name == "elect") {
      i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
        const int first = std::countr_zero(lanes);
        each(lanes, [&](int l) {
          w.put<uint32_t>(i.to[0], l, first);
          w.put<uint8_t>(i.to.at(1), l, l == first);
        });
      };
    } else if (name == "mma") {
      std::string types;
      for (size_t k = 6; k < parts.size(); ++k) types += (k > 6 ? "." : "") + parts[k];
      i.run = products(parts.at(3), types);
    } else {
      if (parts.at(3) != "m8n8" || !has("b16")) fail("unknown");
      i.run = load_matrices(has("trans"), space_of(parts));
    }
  } else if (name == "wgmma") {
    i.kind = Kind::together;
    i.members = {-1, ~0u};
    i.run = wide_products(parts, i);
  } else if (name == "cp" && parts.size() > 2 && parts[2] == "mbarrier") {
    if (!has("noinc")) fail("unknown");
    i.run = late_arrivals();
  } else if (name == "mbarrier") {
    i.run = memory_barriers(parts);
  } else if (name == "cp" && has("bulk")) {
    i.run = bulk_copies(parts);
  } else if (name == "fence" && parts.at(1) == "proxy") {
    i.run = [](Warp& w, const Instruction&, uint32_t lanes) { publish(w, lanes); };
  } else {
    return false;
  }
  return true;
}
