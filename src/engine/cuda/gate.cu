// activation(gate) × up, eight numbers a thread. gate_up (N, 2 × INTERMEDIATE): gates, then ups; out (N, INTERMEDIATE).
constexpr int EIGHTS = INTERMEDIATE / 8;
size_t index = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
if (index >= size_t(gate_up_shape[0]) * EIGHTS) return;
size_t row = index / EIGHTS, column = index % EIGHTS;
const T* own = gate_up + row * 2 * INTERMEDIATE + column * 8;
uint4 gates = *reinterpret_cast<const uint4*>(own), ups = *reinterpret_cast<const uint4*>(own + INTERMEDIATE);
T result[8];
#pragma unroll
for (int i = 0; i < 8; ++i) {
  float x = float(reinterpret_cast<const T*>(&gates)[i]), activated;
  if (GELU) {
    activated = 0.5f * x * (1.0f + tanhf(0.797884561f * (x + 0.044715f * x * x * x)));
  } else {
    activated = x / (1.0f + __expf(-x));
  }
  result[i] = T(activated * float(reinterpret_cast<const T*>(&ups)[i]));
}
*reinterpret_cast<uint4*>(out + index * 8) = *reinterpret_cast<uint4*>(result);
