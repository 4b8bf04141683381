// x + y, and that normalized to mean 0 and variance 1 (arXiv:1607.06450). A block a row.
//
// x, y (N, WIDTH); weight, bias (WIDTH); total, normed (N, WIDTH).
constexpr int EACH = (WIDTH + THREADS - 1) / THREADS;
__shared__ float of_warps[THREADS / 32];
auto sum_of_block = [&](float own) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) own += __shfl_xor_sync(0xffffffffu, own, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < THREADS / 32; ++w) sum += of_warps[w];
  return sum;
};
size_t row = size_t(blockIdx.x) * WIDTH;
float own[EACH], sum = 0, squares = 0;
#pragma unroll
for (int i = 0; i < EACH; ++i) {
  int column = i * THREADS + threadIdx.x;
  own[i] = 0;
  if (column < WIDTH) {
    T added = T(float(x[row + column]) + float(y[row + column]));
    total[row + column] = added;
    own[i] = float(added);
    sum += own[i];
  }
}
float mean = sum_of_block(sum) / WIDTH;
#pragma unroll
for (int i = 0; i < EACH; ++i)
  if (i * THREADS + threadIdx.x < WIDTH) squares += (own[i] - mean) * (own[i] - mean);
float factor = rsqrtf(sum_of_block(squares) / WIDTH + EPSILON);
#pragma unroll
for (int i = 0; i < EACH; ++i) {
  int column = i * THREADS + threadIdx.x;
  if (column < WIDTH) normed[row + column] = T((own[i] - mean) * factor * float(weight[column]) + float(bias[column]));
}
