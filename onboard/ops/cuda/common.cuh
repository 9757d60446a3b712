// What kernels share: bfloat16, products of it, and the memories of a cluster's programs. It stands before every source.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

__device__ __forceinline__ float low_of(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high_of(u32 v) { return __uint_as_float(v & 0xFFFF0000u); }
__device__ __forceinline__ u32 pair(float low, float high) {
  u32 both; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low)); return both;
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {  // two products, each rounded once
  u32 both; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b)); return both;
}
__device__ __forceinline__ float rounded(float v) { return low_of(pair(v, 0.f)); }

__device__ __forceinline__ void multiply(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// By the number that an activation has in `activation.py`.
template <int WHICH> __device__ __forceinline__ float activate(float v) {
  if (WHICH == 1) return __fdividef(v, 1.f + __expf(-v));
  if (WHICH == 2) return .5f * v * (1.f + erff(v * .70710678118654752f));
  if (WHICH == 3) return .5f * v * (1.f + tanhf(.79788456080286536f * v * (1.f + .044715f * v * v)));
  if (WHICH == 4) return fmaxf(v, 0.f);
  if (WHICH == 5) return fmaxf(v, 0.f) * fmaxf(v, 0.f);
  return v;
}

// Where a program of the cluster has what lies at a place of this one's memory.
__device__ __forceinline__ u32 place_at(const void* place, int rank) {
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((u32)__cvta_generic_to_shared(place)), "r"(rank));
  return address;
}
__device__ __forceinline__ float read_at(const float* place, int rank) {
  float v; asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(place_at(place, rank)));
  return v;
}
__device__ __forceinline__ float4 read_four_at(const float* place, int rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(place_at(place, rank)));
  return v;
}
__device__ __forceinline__ void write_at(float* place, float v, int rank) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(place_at(place, rank)), "f"(v) : "memory");
}
__device__ __forceinline__ void write_at(float4* place, const float4& v, int rank) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};"
               :: "r"(place_at(place, rank)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
// All programs of a cluster meet, and see what each has written.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
// A program says that it is there, and waits until all are: before their memories are written to.
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed;"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Copies to the program's memory, which a thread waits for itself; those asked for together are done together. What is not
// given is zero.
__device__ __forceinline__ void copy_sixteen(void* to, const void* from, bool given) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(given ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_four(void* to, const void* from, bool given) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4, %2;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(given ? 4 : 0) : "memory");
}
__device__ __forceinline__ void copies_asked() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
