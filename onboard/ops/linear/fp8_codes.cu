// Rows of bfloat16 numbers as eight-bit floats, with the norm or the gate before them in the same pass: a row is CLUSTER
// programs', and eight neighbouring columns a thread's.
constexpr int WARPS = THREADS / 32;
constexpr bool GATED = ACTIVATION != 0;

struct Arguments {
  u8* codes;
  float* scales;
  const u16 *x, *norm;
  const float* given;
  int columns;
  float eps;
};

__device__ __forceinline__ void read(float (&v)[8], const u16* from) {
  const uint4 both = *(const uint4*)from;
  const u32 words[4] = {both.x, both.y, both.z, both.w};
#pragma unroll
  for (int i = 0; i < 4; i++) v[2 * i] = low_of(words[i]), v[2 * i + 1] = high_of(words[i]);
}

struct Sum {
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct Most {
  static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};
template <typename Which> __device__ __forceinline__ float of_lanes(float v, int lanes) {
#pragma unroll
  for (int i = 1; i < 32; i *= 2) if (i < lanes) v = Which::of(v, __shfl_xor_sync(~0u, v, i));
  return v;
}
// Of a row: each warp tells all programs what it has, in numbers that nothing else is kept in.
template <typename Which> __device__ __forceinline__ float of_row(float v, float (&kept)[CLUSTER * WARPS]) {
  v = of_lanes<Which>(v, 32);
  const int lane = threadIdx.x % 32, place = blockIdx.x % CLUSTER * WARPS + threadIdx.x / 32;
  if (CLUSTER > 1 && lane < CLUSTER) write_at(kept + place, v, lane);
  if (CLUSTER == 1 && lane == 0) kept[place] = v;
  if (CLUSTER > 1) meet_cluster();
  else __syncthreads();
  v = lane < CLUSTER * WARPS ? kept[lane] : 0.f;
  for (int i = lane + 32; i < CLUSTER * WARPS; i += 32) v = Which::of(v, kept[i]);
  return of_lanes<Which>(v, 32);
}

extern "C" __global__ void __launch_bounds__(THREADS) fp8_codes(const Arguments a) {
  __shared__ float sums[CLUSTER * WARPS], largest[CLUSTER * WARPS];
  if (CLUSTER > 1) arrive_at_cluster();
  const i64 row = blockIdx.x / CLUSTER;
  const int column = (blockIdx.x % CLUSTER * THREADS + threadIdx.x) * 8;
  const bool inside = column < a.columns;
  float norm[8], v[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
  if (HAS_NORM && inside) read(norm, a.norm + column);
  if (EARLY) asm volatile("griddepcontrol.launch_dependents;");  // what comes next reads weights alone before it waits
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (!EARLY) asm volatile("griddepcontrol.launch_dependents;");
  if (inside) {
    const u16* from = a.x + row * a.columns * (GATED ? 2 : 1) + column;
    read(v, from);
    if (GATED) {
      float up[8];
      read(up, from + a.columns);
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = rounded(activate<ACTIVATION>(v[i]) * up[i]);
    }
  }
  if (CLUSTER > 1) wait_for_cluster();
  if (HAS_NORM) {
    float sum = 0.f;
#pragma unroll
    for (float x : v) sum += x * x;
    const float factor = rsqrtf(of_row<Sum>(sum, sums) / a.columns + a.eps);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = inside ? rounded(rounded(v[i] * factor) * norm[i]) : 0.f;
  }
  float most = 0.f;
#pragma unroll
  for (float x : v) most = fmaxf(most, fabsf(x));
  if (!GIVEN) most = GROUPED ? of_lanes<Most>(most, 16) : of_row<Most>(most, largest);
  const float scale = GIVEN ? *a.given : fmaxf(__fdiv_rn(most, 448.f), 1e-12f);
  if (!inside) return;
  u32 codes[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    u16 low, high;
    const float* x = v + 4 * i;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(__fdiv_rn(x[1], scale)), "f"(__fdiv_rn(x[0], scale)));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(__fdiv_rn(x[3], scale)), "f"(__fdiv_rn(x[2], scale)));
    codes[i] = low | (u32)high << 16;
  }
  *(uint2*)(a.codes + row * a.columns + column) = make_uint2(codes[0], codes[1]);
  if (GROUPED && column % 128 == 0) a.scales[row * ((a.columns + 127) / 128) + column / 128] = scale;
  if (!GROUPED && column == 0) a.scales[row] = scale;
}
