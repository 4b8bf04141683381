// Attention of prompt tokens over what the cache holds of their own sequences, up to each token's own position. A warp takes the
// heads that share a key head, of as many tokens as fit into 16 rows; it reads keys and values where they lie, and the four warps of
// a block read the same ones at about the same time.
//
// queries (tokens, HEADS × HEAD_DIM), turned; tiles (tiles, 4): first token, tokens, slot, position of the first token; keys, values
// (slots, KV_HEADS, ring, HEAD_DIM); out as queries. Rings are not entered twice: no position is beyond the ring.
constexpr int TOKENS = 16 / GROUP;
int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
int kv_head = blockIdx.x, ring = keys_shape[2];
const int* tile = tiles + 4 * blockIdx.y;
int first = warp * TOKENS, count = min(tile[1] - first, TOKENS);
if (count <= 0) return;
size_t base = (size_t(tile[2]) * KV_HEADS + kv_head) * ring * HEAD_DIM;
Rows rows;
rows.clear();
int limit[2];
size_t place[2];
bool taken[2];
#pragma unroll
for (int r = 0; r < 2; ++r) {
  int row = g + 8 * r, token = row / GROUP;
  taken[r] = token < count && row < TOKENS * GROUP;
  limit[r] = taken[r] ? tile[3] + first + token + 1 : 0;
  place[r] = (size_t(tile[0] + first + token) * HEADS + kv_head * GROUP + row % GROUP) * HEAD_DIM;
#pragma unroll
  for (int s = 0; s < SEGMENTS; ++s)
    rows.query[s][r] = taken[r] ? *reinterpret_cast<const uint4*>(queries + place[r] + s * 32 + t * 8) : make_uint4(0, 0, 0, 0);
}
float scale = constants[HEAD_DIM / 2 + 2] * 1.44269504f;
int stored = tile[3] + first + count;
for (int key = 0; key < stored; key += KEYS) rows.see(keys + base, values + base, key, stored, limit, scale);
rows.finish();
#pragma unroll
for (int r = 0; r < 2; ++r) {
  if (!taken[r]) continue;
  float factor = 1.0f / rows.sum[r];
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T line[8];
#pragma unroll
      for (int d = 0; d < 8; ++d) line[d] = T(rows.output[c][d][2 * r + half] * factor);
      *reinterpret_cast<uint4*>(out + place[r] + c * 64 + (2 * t + half) * 8) = *reinterpret_cast<uint4*>(line);
    }
}
