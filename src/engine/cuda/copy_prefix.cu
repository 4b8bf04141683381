// The first tokens of a slot into others, in place, eight numbers a thread. keys, values (slots, KV_HEADS, ring, HEAD_DIM); slots: the
// one to copy from, how many tokens, and those to copy to, one for each of gridDim.z; done (1).
int index = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
if (index == 0 && blockIdx.y == 0 && blockIdx.z == 0) done[0] = 1;
if (index >= slots[1] * HEAD_DIM) return;
size_t head = size_t(keys_shape[2]) * HEAD_DIM;
size_t from = (size_t(slots[0]) * KV_HEADS + blockIdx.y) * head + index;
size_t to = (size_t(slots[2 + blockIdx.z]) * KV_HEADS + blockIdx.y) * head + index;
*reinterpret_cast<uint4*>(const_cast<T*>(keys) + to) = *reinterpret_cast<const uint4*>(keys + from);
*reinterpret_cast<uint4*>(const_cast<T*>(values) + to) = *reinterpret_cast<const uint4*>(values + from);
