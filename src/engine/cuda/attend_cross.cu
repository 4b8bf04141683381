// Each token's attention over all that was stored for its slot. A block takes the heads of a token that share a key head.
//
// queries (N, HEADS × HEAD_DIM); places (N, 2), of which the first number is the slot; constants: the scale of scores; keys, values
// (slots, KV_HEADS, stored, HEAD_DIM); out (N, HEADS × HEAD_DIM).
int stored = keys_shape[2];
size_t group = size_t(blockIdx.y) * KV_HEADS + blockIdx.x;
size_t base = (size_t(places[2 * blockIdx.y]) * KV_HEADS + blockIdx.x) * stored * HEAD_DIM;
const T(*own)[HEAD_DIM] = reinterpret_cast<const T(*)[HEAD_DIM]>(queries + group * GROUP * HEAD_DIM);
attend_together(
    own, keys + base, values + base, 0, stored, constants[0] * 1.44269504f,
    [&](int head, int d, float numerator, float, float denominator) {
      out[(group * GROUP + head) * HEAD_DIM + d] = T(numerator / denominator);
    });
