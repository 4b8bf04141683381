// Queries of prompt tokens, turned; their keys, turned, and values into the cache, in place. A warp a head.
//
// qkv (N, (HEADS + 2 KV_HEADS) × HEAD_DIM), of which the first tokens are prompts' (as many as `places` (tokens, 2) has: slot and
// position); keys, values (slots, KV_HEADS, ring, HEAD_DIM); out (tokens, HEADS × HEAD_DIM).
constexpr int ALL = HEADS + 2 * KV_HEADS;
int lane = threadIdx.x % 32;
int index = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
int token = index / ALL, head = index % ALL;
if (token >= places_shape[0]) return;
const T* x = qkv + (size_t(token) * ALL + head) * HEAD_DIM;
int slot = places[2 * token], position = places[2 * token + 1];
Head own;
own.load(x, lane);
if (head < HEADS) {
  if (NORMED) own.norm(q_norm, constants[HEAD_DIM / 2 + 1], lane);
  own.turn(constants, position, lane);
  own.store(out + (size_t(token) * HEADS + head) * HEAD_DIM, lane);
  return;
}
int kv_head = (head - HEADS) % KV_HEADS, ring = keys_shape[2];
size_t at = ((size_t(slot) * KV_HEADS + kv_head) * ring + position % ring) * HEAD_DIM;
if (head < HEADS + KV_HEADS) {
  if (NORMED) own.norm(k_norm, constants[HEAD_DIM / 2 + 1], lane);
  own.turn(constants, position, lane);
  own.store(const_cast<T*>(keys) + at, lane);
} else {
  own.store(const_cast<T*>(values) + at, lane);
}
