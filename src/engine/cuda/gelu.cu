// 0.5 x (1 + erf(x / √2)) (arXiv:1606.08415), eight numbers a thread. x, out (N, a multiple of 8).
size_t index = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
if (index >= size_t(x_shape[0]) * (x_shape[1] / 8)) return;
uint4 own = *reinterpret_cast<const uint4*>(x + index * 8);
T result[8];
#pragma unroll
for (int i = 0; i < 8; ++i) {
  float number = float(reinterpret_cast<const T*>(&own)[i]);
  result[i] = T(0.5f * number * (1.0f + erff(number * 0.707106781f)));
}
*reinterpret_cast<uint4*>(out + index * 8) = *reinterpret_cast<uint4*>(result);
