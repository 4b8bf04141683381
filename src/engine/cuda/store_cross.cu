// Keys and values of encoded inputs into their slots, in place, eight numbers a thread.
//
// encoded (inputs × stored, 2 × KV_HEADS × HEAD_DIM): a token's keys, then its values; slots (inputs); keys, values (slots, KV_HEADS,
// stored, HEAD_DIM); done (1) says when.
constexpr int EIGHTS = HEAD_DIM / 8;
int stored = keys_shape[2];
size_t index = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
int eighth = index % EIGHTS;
int token = index / EIGHTS % stored;
int head = index / EIGHTS / stored % (2 * KV_HEADS);
int input = index / EIGHTS / stored / (2 * KV_HEADS);
if (input >= slots_shape[0]) return;
T* all = const_cast<T*>(head < KV_HEADS ? keys : values);
size_t to = ((size_t(slots[input]) * KV_HEADS + head % KV_HEADS) * stored + token) * HEAD_DIM + eighth * 8;
size_t from = ((size_t(input) * stored + token) * 2 * KV_HEADS + head) * HEAD_DIM + eighth * 8;
*reinterpret_cast<uint4*>(all + to) = *reinterpret_cast<const uint4*>(encoded + from);
if (index == 0) done[0] = 1;
