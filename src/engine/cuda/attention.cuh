// What the kernels of this folder share. `T` (bfloat16 or float16, as BFLOAT16 says), HEADS, KV_HEADS, HEAD_DIM, TRADITIONAL and NORMED come before it,
// from the model.
//
// Products go through mma.sync m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"), with 16 query rows in A. The order in which
// a product adds up is free, so keys and values come in pieces of 16 bytes straight from the cache: the order of the head's numbers
// in a fragment is whatever those pieces make it, for queries and keys alike.

constexpr int GROUP = HEADS / KV_HEADS;
constexpr int PAIRS = HEAD_DIM / 64;       // pairs of a rope that a lane turns
constexpr int SEGMENTS = HEAD_DIM / 32;    // pieces of a key that a lane loads
constexpr int CHUNKS = HEAD_DIM / 64;      // pieces of a value
constexpr int KEYS = HEAD_DIM == 64 ? 32 : 16;
constexpr int TILES = KEYS / 8;

__device__ inline unsigned packed(float low, float high) {
  T pair[2] = {T(low), T(high)};
  return *reinterpret_cast<unsigned*>(pair);
}

__device__ inline void multiply_add(
    float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  if constexpr (BFLOAT16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// One head of a token, normalized where the model does and turned to its position, by the lanes of a warp. `constants` are the
// HEAD_DIM / 2 inverse frequencies, a factor on the input, the norm's epsilon and the scale of scores.
struct Head {
  float low[PAIRS], high[PAIRS];

  __device__ static int low_at(int pair) { return TRADITIONAL ? 2 * pair : pair; }
  __device__ static int high_at(int pair) { return TRADITIONAL ? 2 * pair + 1 : pair + HEAD_DIM / 2; }

  __device__ void load(const T* x, int lane) {
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      low[p] = float(x[low_at(p * 32 + lane)]);
      high[p] = float(x[high_at(p * 32 + lane)]);
    }
  }

  __device__ void norm(const T* weight, float epsilon, int lane) {
    float squares = 0;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) squares += low[p] * low[p] + high[p] * high[p];
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    float factor = rsqrtf(squares / HEAD_DIM + epsilon);
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      low[p] = float(T(low[p] * factor * float(weight[low_at(p * 32 + lane)])));
      high[p] = float(T(high[p] * factor * float(weight[high_at(p * 32 + lane)])));
    }
  }

  __device__ void turn(const float* constants, int position, int lane) {
    float factor = constants[HEAD_DIM / 2];
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      float sine, cosine;
      sincosf(float(position) * constants[p * 32 + lane], &sine, &cosine);
      float a = low[p] * factor, b = high[p] * factor;
      low[p] = a * cosine - b * sine;
      high[p] = a * sine + b * cosine;
    }
  }

  __device__ void store(T* y, int lane) const {
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      y[low_at(p * 32 + lane)] = T(low[p]);
      y[high_at(p * 32 + lane)] = T(high[p]);
    }
  }
};

// A warp's 16 query rows and what they have seen so far.
struct Rows {
  uint4 query[SEGMENTS][2];
  float output[CHUNKS][8][4];
  float largest[2], sum[2];

  __device__ void clear() {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
      for (int d = 0; d < 8; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) output[c][d][i] = 0;
    largest[0] = largest[1] = -1e30f;
    sum[0] = sum[1] = 0;
  }

  // Keys `first .. first + KEYS` of `keys` and `values` (stored, HEAD_DIM), of which row r sees those below limit[r].
  __device__ void see(const T* keys, const T* values, int first, int stored, const int (&limit)[2], float scale) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    uint4 k[TILES][SEGMENTS], v[TILES][2][CHUNKS];
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      int key = first + j * 8 + g;
#pragma unroll
      for (int s = 0; s < SEGMENTS; ++s)
        k[j][s] = key < stored ? *reinterpret_cast<const uint4*>(keys + size_t(key) * HEAD_DIM + s * 32 + t * 8) : zero;
    }
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int key = first + j * 8 + t * 2 + i;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
          v[j][i][c] = key < stored ? *reinterpret_cast<const uint4*>(values + size_t(key) * HEAD_DIM + c * 64 + g * 8) : zero;
      }
    float scores[TILES][4];
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[j][i] = 0;
#pragma unroll
      for (int s = 0; s < SEGMENTS; ++s) {
        multiply_add(scores[j], query[s][0].x, query[s][1].x, query[s][0].y, query[s][1].y, k[j][s].x, k[j][s].y);
        multiply_add(scores[j], query[s][0].z, query[s][1].z, query[s][0].w, query[s][1].w, k[j][s].z, k[j][s].w);
      }
    }
    float best[2] = {largest[0], largest[1]};
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int key = first + j * 8 + t * 2 + i % 2;
        scores[j][i] = key < limit[i / 2] ? scores[j][i] * scale : -INFINITY;
        best[i / 2] = fmaxf(best[i / 2], scores[j][i]);
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      best[r] = fmaxf(best[r], __shfl_xor_sync(0xffffffffu, best[r], 1));
      best[r] = fmaxf(best[r], __shfl_xor_sync(0xffffffffu, best[r], 2));
      float factor = exp2f(largest[r] - best[r]);
      largest[r] = best[r];
      sum[r] *= factor;
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
        for (int d = 0; d < 8; ++d) {
          output[c][d][2 * r] *= factor;
          output[c][d][2 * r + 1] *= factor;
        }
    }
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[j][i] = exp2f(scores[j][i] - largest[i / 2]);
        sum[i / 2] += scores[j][i];
      }
#pragma unroll
    for (int j = 0; j < TILES; j += 2) {
      unsigned a0 = packed(scores[j][0], scores[j][1]), a1 = packed(scores[j][2], scores[j][3]);
      unsigned a2 = packed(scores[j + 1][0], scores[j + 1][1]), a3 = packed(scores[j + 1][2], scores[j + 1][3]);
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        const unsigned* va = &v[j][0][c].x;
        const unsigned* vb = &v[j][1][c].x;
        const unsigned* vc = &v[j + 1][0][c].x;
        const unsigned* vd = &v[j + 1][1][c].x;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          multiply_add(output[c][2 * i], a0, a1, a2, a3, __byte_perm(va[i], vb[i], 0x5410), __byte_perm(vc[i], vd[i], 0x5410));
          multiply_add(output[c][2 * i + 1], a0, a1, a2, a3, __byte_perm(va[i], vb[i], 0x7632), __byte_perm(vc[i], vd[i], 0x7632));
        }
      }
    }
  }

  // The sums of a row's four lanes become one.
  __device__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
    }
  }
};

// A block's warps attend together: GROUP queries over keys `first .. end` of `keys` and `values` (stored, HEAD_DIM). `write` is given
// each number of each head once, with the head's largest score and the sum that it is to be divided by.
template <typename Write>
__device__ void attend_together(
    const T (*queries)[HEAD_DIM], const T* keys, const T* values, int first, int end, float scale, Write write) {
  __shared__ float warp_largest[WARPS][GROUP], warp_sum[WARPS][GROUP];
  __shared__ float warp_output[WARPS][GROUP][HEAD_DIM];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  Rows rows;
  rows.clear();
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s)
      rows.query[s][r] =
          g + 8 * r < GROUP ? *reinterpret_cast<const uint4*>(&queries[g + 8 * r][s * 32 + t * 8]) : make_uint4(0, 0, 0, 0);
  const int limit[2] = {end, end};
  for (int key = first + warp * KEYS; key < end; key += WARPS * KEYS) rows.see(keys, values, key, end, limit, scale);
  rows.finish();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int head = g + 8 * r;
    if (head >= GROUP) continue;
    if (t == 0) {
      warp_largest[warp][head] = rows.largest[r];
      warp_sum[warp][head] = rows.sum[r];
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int d = 0; d < 8; ++d) warp_output[warp][head][c * 64 + (2 * t + half) * 8 + d] = rows.output[c][d][2 * r + half];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += WARPS * 32) {
    int head = i / HEAD_DIM, d = i % HEAD_DIM;
    float largest = warp_largest[0][head];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) largest = fmaxf(largest, warp_largest[w][head]);
    float numerator = 0, denominator = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      float factor = exp2f(warp_largest[w][head] - largest);
      numerator += factor * warp_output[w][head][d];
      denominator += factor * warp_sum[w][head];
    }
    write(head, d, numerator, largest, denominator);
  }
}
