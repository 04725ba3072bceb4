// The fused decoder's attention.
#pragma once

#include "transformer_decoder_fused_block.cuh"

namespace svexport::fused {

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two warps share the 16 rows of a head; each takes every other block of 64 keys. The result goes to kIn, in both
// blocks. Keys and dimensions are permuted within a fragment, such that each lane reads 16 adjacent bytes.
template <class T>
__device__ __forceinline__ void attend(const Fused& a, Shared<T>& s, int half, int warp, int lane,
                                       const Exchange& blocks, int& slot, uint32_t& parity) {
  asm volatile("" : "+r"(warp), "+r"(lane));  // or values derived from them stay in registers throughout the kernel
  const int share = warp % 2, own_head = warp / 2, head = half * kOwnHeads + own_head;
  const int group = lane / 4, quarter = lane % 4, key_blocks = a.keys / kKeyBlock;
  constexpr int kBlockBytes = kKeyBlock * kHeadDim * 2;
  const uint32_t keys =
      own_head * kHeadBytes + share * kBlockBytes + (lane / 8 * 8 + group % 2) * (kHeadDim * 2) + quarter * 16;
  const uint32_t values =
      own_head * kHeadBytes + kHeadBytes / 2 + share * kBlockBytes + 2 * value_at(group, quarter * 8);

  uint32_t query[2][4];
  {
    const uint32_t tile = shared_address(s.tiles[kQuery]);
    const uint4 low = load_shared(tile + chunk_at(group, head * 4 + quarter));
    const uint4 high = load_shared(tile + chunk_at(group + 8, head * 4 + quarter));
    query[0][0] = low.x, query[0][1] = high.x, query[0][2] = low.y, query[0][3] = high.y;
    query[1][0] = low.z, query[1][1] = high.z, query[1][2] = low.w, query[1][3] = high.w;
  }
  const uint32_t one = pack<T>(1.f, 1.f);
  float sum[4][4] = {}, totals[4] = {},
        largest[2] = {-INFINITY, -INFINITY};  // totals: sums of weights, as products with ones
#pragma unroll 1
  for (int b = share;; b += 2) {
    const uint32_t memory = shared_address(s.weights[0]) + slot * kSlotBytes;
    if (b < key_blocks) {
      uint4 key[8], value[2][4];
      UNROLL for (int t = 0; t < 8; ++t) {
        key[t] = load_shared(memory + keys + (t / 4 * 32 + t % 4 * 2) * (kHeadDim * 2));
      }
      UNROLL for (int t = 0; t < 8; ++t) {
        value[t / 4][t % 4] = load_shared(memory + (values + t % 4 * (8 * kKeyBlock * 2) ^ t / 4 * 64));
      }
      float score[8][4] = {};
      UNROLL for (int t = 0; t < 8; ++t) mma<T>(score[t], query[0], key[t].x, key[t].y);
      UNROLL for (int t = 0; t < 8; ++t) mma<T>(score[t], query[1], key[t].z, key[t].w);
      if (b == key_blocks - 1) {
        UNROLL for (int t = 0; t < 8; ++t) {
          UNROLL for (int i = 0; i < 4; ++i) {
            if (b * kKeyBlock + t / 4 * 32 + quarter * 8 + t % 4 * 2 + i % 2 >= a.queries) score[t][i] = -INFINITY;
          }
        }
      }
      float higher[2];
      UNROLL for (int i = 0; i < 2; ++i) higher[i] = row_max(score, i, largest[i]);  // rows group + 8 * i
      if (__any_sync(0xffffffffu, higher[0] != largest[0] || higher[1] != largest[1])) {
        UNROLL for (int i = 0; i < 2; ++i) {
          const float shrink = exp2_approximate(largest[i] - higher[i]);
          largest[i] = higher[i];
          UNROLL for (int t = 0; t < 4; ++t) sum[t][2 * i] *= shrink, sum[t][2 * i + 1] *= shrink;
          totals[2 * i] *= shrink, totals[2 * i + 1] *= shrink;
        }
      }
      // Sixteen keys at a time: while they are multiplied, the weights of the next ones are computed.
      uint32_t weights[2][4];
      auto weigh = [&](int k) {
        UNROLL for (int j = 0; j < 4; ++j) {
          const float (&of)[4] = score[2 * k + j / 2];
          const int i = j % 2;
          weights[k % 2][j] =
              pack<T>(exp2_approximate(of[2 * i] - largest[i]), exp2_approximate(of[2 * i + 1] - largest[i]));
        }
      };
      weigh(0);
      UNROLL for (int k = 0; k < 4; ++k) {
        if (k < 3) weigh(k + 1);
        mma<T>(totals, weights[k % 2], one, one);
        UNROLL for (int t = 0; t < 4; ++t) {
          const uint4& v = value[k / 2][t];
          mma<T>(sum[t], weights[k % 2], k % 2 ? v.z : v.x, k % 2 ? v.w : v.y);
        }
      }
    }
    arrive_for_warp(shared_address(&s.empty[slot]), lane);
    if (++slot == kSlots) slot = 0, parity ^= 1;
    if (b - share + 2 >= key_blocks) break;
    wait_for(shared_address(&s.full[slot]), parity);
  }

  // The two warps exchange halves: each ends with half of the dimensions. kSum and the logits are free for this.
  float* const given = reinterpret_cast<float*>(s.tiles[kSum]) + warp * 256 + lane;
  const float* const taken = reinterpret_cast<const float*>(s.tiles[kSum]) + (warp ^ 1) * 256 + lane;
  float* const ends = s.logits;  // [warp][row][largest, total]
  UNROLL for (int j = 0; j < 8; ++j) given[j * 32] = share ? sum[j / 4][j % 4] : sum[2 + j / 4][j % 4];
  UNROLL for (int i = 0; i < 2; ++i) {
    if (quarter == 0) {
      reinterpret_cast<float2*>(ends)[warp * 16 + i * 8 + group] = make_float2(largest[i], totals[2 * i]);
    }
  }
  sync();
  uint32_t result[4];
  UNROLL for (int i = 0; i < 2; ++i) {
    const float2 other = reinterpret_cast<const float2*>(ends)[(warp ^ 1) * 16 + i * 8 + group];
    const float highest = fmaxf(largest[i], other.x);
    float mine = exp2_approximate(largest[i] - highest), theirs = exp2_approximate(other.x - highest);
    const float scale = 1.f / (mine * totals[2 * i] + theirs * other.y);
    mine *= scale, theirs *= scale;
    UNROLL for (int t = 0; t < 2; ++t) {
      float x[2];
      UNROLL for (int j = 0; j < 2; ++j) {
        const float own = share ? sum[2 + t][2 * i + j] : sum[t][2 * i + j];
        x[j] = mine * own + theirs * taken[(t * 4 + 2 * i + j) * 32];
      }
      result[t * 2 + i] = pack<T>(x[0], x[1]);
    }
  }
  const uint32_t at =
      shared_address(s.tiles[kIn]) + chunk_at(lane / 8 % 2 * 8 + lane % 8, head * 4 + share * 2 + lane / 16);
  store_matrix(at, result);
  __syncwarp();
  blocks.send(at, load_shared(at));
}

}  // namespace svexport::fused
