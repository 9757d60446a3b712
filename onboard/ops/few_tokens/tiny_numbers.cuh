// Numbers of the kernels for weights of few bits (`few_tokens.cu`): scales, codes, and products of bfloat16.
//
// Macros: BITS, INTEGERS, GROUP, EVEN, RING, SCALE_TYPE, ROUTING_TYPE.
constexpr int RUN = 512 / BITS;  // inputs whose codes are sixteen words
constexpr bool FOLDED = RING > 0;

// What inputs are multiplied by, since codes are read as tiny numbers, and what sums are multiplied by.
// Weights that are FOLDED with their scales have their own size.
constexpr u32 LARGE_PAIR = FOLDED ? 0x3F803F80u : 0x60806080u;  // 1 or 2^66 twice, as bfloat16
constexpr u32 FOUR_BITS = 0x02000200u;                          // what 2^4 is of exponents
constexpr float LARGE = 73786976294838206464.f;                 // 2^66
constexpr float BACK = FOLDED ? 1.f : BITS == 8 ? 18014398509481984.f : INTEGERS ? 147573952589676412928.f : 1152921504606846976.f;  // 2^54, 2^67, 2^60

#if SCALE_TYPE == 0  // bfloat16
typedef u16 scale_t;
__device__ __forceinline__ float number(scale_t s) { return low_of(s); }
#elif SCALE_TYPE == 1  // E8M0; 2^-127 is no normal number
typedef u8 scale_t;
__device__ __forceinline__ float number(scale_t s) { return __uint_as_float(max((u32)s << 23, 1u << 22)); }
#elif SCALE_TYPE == 2  // float32
typedef float scale_t;
__device__ __forceinline__ float number(scale_t s) { return s; }
#elif SCALE_TYPE == 3  // float16
typedef u16 scale_t;
__device__ __forceinline__ float number(scale_t s) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(s)); return f; }
#else  // E4M3
typedef u8 scale_t;
__device__ __forceinline__ float number(scale_t s) {
  u32 both; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"((u16)s));
  float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)both));
  return f;
}
#endif

// Two neighbouring numbers of a type, which one load brings where their number in a row is EVEN. They are taken
// apart where they are used: before, that would wait for the load.
template <typename T> struct Both;
template <> struct Both<u8> { typedef u16 type; static __device__ u8 at(u16 both, int i) { return i ? both >> 8 : both; } };
template <> struct Both<u16> { typedef u32 type; static __device__ u16 at(u32 both, int i) { return i ? both >> 16 : both; } };
template <> struct Both<float> { typedef float2 type; static __device__ float at(float2 both, int i) { return i ? both.y : both.x; } };
template <typename T> struct Neighbours {
#if EVEN
  typename Both<T>::type both;
  __device__ __forceinline__ void load(const T* row, int i, int count) { both = *(const typename Both<T>::type*)(row + min(i, count - 2)); }
  __device__ __forceinline__ T at(int i) const { return Both<T>::at(both, i); }
#else
  T one[2];
  __device__ __forceinline__ void load(const T* row, int i, int count) {
#pragma unroll
    for (int j = 0; j < 2; j++) one[j] = row[min(GROUP > RUN ? (i + j) * RUN / GROUP : i + j, count - 1)];
  }
  __device__ __forceinline__ T at(int i) const { return one[i]; }
#endif
};

#if ROUTING_TYPE == 0  // bfloat16
typedef u16 routing_t;
__device__ __forceinline__ float weight_of(routing_t w) { return low_of(w); }
#else  // float32
typedef float routing_t;
__device__ __forceinline__ float weight_of(routing_t w) { return w; }
#endif

__device__ __forceinline__ void stream(uint4& v, const uint4* from) {
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
}

// 4 and 64, which the compiler does not know: multiplications have a pipe of their own, shifts and masks share one of
// half the rate.
struct Powers { u32 four, sixty_four; };

// Bits 0 to 3 (of ODD planes 4 to 7) of both halves as numbers; of eight bits, bytes 0 and 2 (or 1 and 3).
template <int ODD> __device__ __forceinline__ u32 decode(u32 word, Powers by) {
  if (BITS == 8) return (((ODD ? word >> 4 : word << 4) & 0x0FF00FF0u) + 0x78007800u) & 0x87F087F0u;
  const u32 code = word & (ODD ? 0x00F000F0u : 0x000F000Fu);
  if (INTEGERS) return code;
  return (code * (ODD ? by.four : by.sixty_four) + 0x7E007E00u) & 0x81C081C0u;  // a carry takes the sign up
}

// Two scales (E8M0), of both halves, as factors of codes that are 2^126 times too small. Those of 2 and more are LARGE:
// what is left of them is a second factor, since bfloat16 ends at 2^127.
constexpr u32 LARGE_SCALES = 0x00800080u;
template <bool LARGE> __device__ __forceinline__ u32 factors(u32 scales) {
  return (LARGE ? scales & ~LARGE_SCALES : scales) * 128 + 0x3F003F00u + (LARGE ? scales & LARGE_SCALES : 0);
}
__device__ __forceinline__ u32 rest_of_factors(u32 scales) {  // 2^127 or 1
  return 0x3F803F80u + (scales & LARGE_SCALES) / 128 * 0x3F80u;
}

// Two planes of four words of rows g (a) and g + 8 (b), and their inputs.
template <int ODD>
__device__ __forceinline__ void multiply_planes(
    float (&sums)[4], float (&more)[4], const uint4& a, const uint4& b, const uint4& in, Powers by) {
  multiply(sums, decode<ODD>(a.x, by), decode<ODD>(b.x, by), decode<ODD>(a.y, by), decode<ODD>(b.y, by), in.x, in.y);
  multiply(more, decode<ODD>(a.z, by), decode<ODD>(b.z, by), decode<ODD>(a.w, by), decode<ODD>(b.w, by), in.z, in.w);
}

__device__ __forceinline__ void shift(uint4& v) { v.x >>= 8; v.y >>= 8; v.z >>= 8; v.w >>= 8; }

// Eight inputs, four of each of two planes.
struct Eight { u32 low[2], high[2]; };
__device__ __forceinline__ Eight product_of(const uint2 (&a)[2], const uint2 (&b)[2]) {
  return {{times(a[0].x, b[0].x), times(a[0].y, b[0].y)}, {times(a[1].x, b[1].x), times(a[1].y, b[1].y)}};
}
__device__ __forceinline__ float sum_of(const u32 (&v)[2]) { return low_of(v[0]) + high_of(v[0]) + low_of(v[1]) + high_of(v[1]); }
__device__ __forceinline__ float squares_of(const uint2 (&in)[2]) {
  float sum = 0.f;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float v[4] = {low_of(in[h].x), high_of(in[h].x), low_of(in[h].y), high_of(in[h].y)};
    for (float x : v) sum += x * x;
  }
  return sum;
}

// Sums over a warp's lanes of N values that each has; lane i's is of value i * N / 32.
template <int N> __device__ __forceinline__ float sums_of_lanes(float (&v)[N], int lane) {
  int step = 16;
#pragma unroll
  for (int n = N / 2; n; n /= 2, step /= 2)
#pragma unroll
    for (int i = 0; i < n; i++) {
      const bool upper = lane & step;
      const float other = __shfl_xor_sync(~0u, upper ? v[i] : v[i + n], step);
      v[i] = (upper ? v[i + n] : v[i]) + other;
    }
  for (; step; step /= 2) v[0] += __shfl_xor_sync(~0u, v[0], step);
  return v[0];
}
