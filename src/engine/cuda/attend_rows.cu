// A decode step's attention, each row over its own length. A block takes the heads of a row that share a key head, and SPLIT keys:
// it turns the queries and the new key, writes key and value into the cache in place, and attends. Rows with more keys have several
// blocks; the last of them to finish adds up the parts, in order, so that a row's result depends on its own length alone.
//
// qkv (N, (HEADS + 2 KV_HEADS) × HEAD_DIM), of which the last gridDim.y tokens are the decoding rows'; places (rows, 2): slot and
// position; keys, values (slots, KV_HEADS, ring, HEAD_DIM); counters (rows × KV_HEADS or more), 0 before and after; out (rows,
// HEADS × HEAD_DIM); parts (rows, KV_HEADS, gridDim.z, GROUP, HEAD_DIM + 2) where gridDim.z > 1.
constexpr int ALL = HEADS + 2 * KV_HEADS;
__shared__ alignas(16) T turned[GROUP + 2][HEAD_DIM];
__shared__ bool is_last;
int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
int kv_head = blockIdx.x, row = blockIdx.y, split = blockIdx.z, ring = keys_shape[2];
int slot = places[2 * row], position = places[2 * row + 1];
int stored = min(position + 1, ring), at = position % ring;
int first = split * SPLIT;
if (first >= stored) return;
size_t base = (size_t(slot) * KV_HEADS + kv_head) * ring * HEAD_DIM;
const T* token = qkv + size_t(qkv_shape[0] - gridDim.y + row) * ALL * HEAD_DIM;
bool writes = at / SPLIT == split;
for (int head = warp; head < GROUP + 2; head += WARPS) {
  if (head >= GROUP && !writes) continue;
  int place = head < GROUP ? kv_head * GROUP + head : HEADS + (head - GROUP) * KV_HEADS + kv_head;
  Head own;
  own.load(token + size_t(place) * HEAD_DIM, lane);
  if (NORMED && head <= GROUP) own.norm(head < GROUP ? q_norm : k_norm, constants[HEAD_DIM / 2 + 1], lane);
  if (head <= GROUP) own.turn(constants, position, lane);
  if (head < GROUP) own.store(turned[head], lane);
  if (head == GROUP) own.store(const_cast<T*>(keys) + base + size_t(at) * HEAD_DIM, lane);
  if (head == GROUP + 1) own.store(const_cast<T*>(values) + base + size_t(at) * HEAD_DIM, lane);
}
__syncthreads();
float scale = constants[HEAD_DIM / 2 + 2] * 1.44269504f;
int splits = (stored + SPLIT - 1) / SPLIT;
size_t group = size_t(row) * KV_HEADS + kv_head;
constexpr int PART = HEAD_DIM + 2;
attend_together(
    turned, keys + base, values + base, first, min(stored, first + SPLIT), scale,
    [&](int head, int d, float numerator, float largest, float denominator) {
      if (splits == 1) {
        out[(group * GROUP + head) * HEAD_DIM + d] = T(numerator / denominator);
        return;
      }
      float* part = parts + ((group * gridDim.z + split) * GROUP + head) * PART;
      part[d] = numerator;
      if (d == 0) {
        part[HEAD_DIM] = largest;
        part[HEAD_DIM + 1] = denominator;
      }
    });
if (splits == 1) return;
__threadfence();
__syncthreads();
int* counter = const_cast<int*>(counters) + group;
if (threadIdx.x == 0) is_last = atomicAdd(counter, 1) == splits - 1;
__syncthreads();
if (!is_last) return;
__threadfence();
for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += WARPS * 32) {
  int head = i / HEAD_DIM, d = i % HEAD_DIM;
  const volatile float* part = parts + (group * gridDim.z * GROUP + head) * PART;
  float largest = -1e30f;
  for (int s = 0; s < splits; ++s) largest = fmaxf(largest, part[size_t(s) * GROUP * PART + HEAD_DIM]);
  float numerator = 0, denominator = 0;
  for (int s = 0; s < splits; ++s) {
    const volatile float* of_split = part + size_t(s) * GROUP * PART;
    float factor = exp2f(of_split[HEAD_DIM] - largest);
    numerator += factor * of_split[d];
    denominator += factor * of_split[HEAD_DIM + 1];
  }
  out[(group * GROUP + head) * HEAD_DIM + d] = T(numerator / denominator);
}
if (threadIdx.x == 0) *counter = 0;
