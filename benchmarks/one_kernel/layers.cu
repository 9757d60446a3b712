// All layers of a dense decoder for one token of one sequence, in one kernel (an experiment; run.py
// compiles it, checks it and takes it apart).
//
// A program on each processor has its rows of every weight. Five products and attention follow one
// another in a layer, and each needs the whole result of the one before: programs send it through
// memory as words of 64 bits, two bfloat16 and the number of the step. A word tells by itself that it
// is there, so that no barrier is needed and nothing has to be reset (NCCL's protocol LL). Weights do
// not depend on the token: one thread asks for them far ahead (bulk copies into a ring of shared
// memory), never for many at once, because words wait behind them in the memory's queues.
//
// Macros that are set for it: H hidden size, HEADS, KV heads, D channels of a head (128), I channels of the MLP,
// L layers, PAGE tokens, EPS, SCALE; CTAS programs, RA, RH, RE rows of a program (of queries, keys and
// values; of the residual stream; of gates), SPLITS shares of a sequence's keys, RING bytes, CHUNK bytes of a
// copy, FLYING copies at once, COPIES of what all programs read; WITHOUT_WAITS, WITHOUT_WEIGHTS,
// WITHOUT_ATTENTION leave a part out, to learn what it takes: results are wrong then.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
__host__ __device__ constexpr int up(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int most(int a, int b) { return a > b ? a : b; }
// Rows of a weight whose banks differ lie in chunks of odd distance: every chunk is 64 bytes further.
__host__ __device__ constexpr int apart(int cols) {
  int low = cols & -cols;
  int d = CHUNK / 2 / low;
  return d <= 1 ? 1 : d <= 4 ? d : 1;
}
constexpr int WARPS = 8, THREADS = 32 * WARPS, PITCH = CHUNK + 64, SLOTS = RING / PITCH;
constexpr int A = HEADS * D, QKV = (HEADS + 2 * KV) * D, G = HEADS / KV;
// Chunks of a layer's stream: queries, keys and values; output; gates, and as many for what they multiply; down.
constexpr int CA = up(RA * H * 2, CHUNK), CD = up(RH * A * 2, CHUNK), CE = up(RE * H * 2, CHUNK),
              CF = up(RH * I * 2, CHUNK);
constexpr int KEYS = 8, W32 = D / 32, W64 = D / 64;  // keys of a warp at a time
// Where the words of a layer are that programs send.
constexpr int W_QKV = 0, W_PART = W_QKV + QKV / 2, W_LSE = W_PART + HEADS * SPLITS * D,
              W_ATT = W_LSE + HEADS * SPLITS, W_X1 = W_ATT + COPIES * A / 2, W_H = W_X1 + COPIES * H / 2,
              W_XO = W_H + COPIES * I / 2, W_ALL = W_XO + COPIES * H / 2;
// Elements of a product's input; pointers of a layer in the table (four weights, two caches); its norms' weights.
constexpr int XS = most(most(H, A), I), SLOT_W = 6, NORMS = 2 * H + 2 * D;

__device__ __forceinline__ float lo(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float hi(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float a, float b) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}
__device__ __forceinline__ float rnd(float a) { return lo(pack(a, 0.f)); }
__device__ __forceinline__ float ex2(float a) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}
__device__ __forceinline__ float lg2(float a) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}
__device__ __forceinline__ float rsq(float a) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}
// Words that programs send one another.
__device__ __forceinline__ u64 peek(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ void put(u64* p, u32 data, u32 tag) {
  u64 v = ((u64)tag << 32) | data;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v));
}
__device__ __forceinline__ u32 smem(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void wait_full(u32 bar, u32 parity) {
  if (WITHOUT_WEIGHTS) return;
  asm volatile(
      "{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra.uni D; bra.uni W; D: "
      "}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ float wsum(float v) {
#pragma unroll
  for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(~0u, v, m);
  return v;
}
__device__ __forceinline__ void mma16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma8(float (&c)[4], u32 a0, u32 a1, u32 b0) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
}
// Keys and values: what is read once must not take the place of what is read again.
__device__ __forceinline__ uint4 old(const u16* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
// The warps that compute; the one that asks for weights goes on by itself.
#define MEET asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory")

struct Shared {
  __align__(16) u16 xs[XS];
  __align__(16) u16 q[8 * D];
  u16 k[D];
  u16 v[D];
  __align__(16) float part[WARPS * most(most(RA, RH), 2 * RE)];
  float squares[WARPS];
  float mix[WARPS][G][D];
  float top[WARPS][G];
  float tot[WARPS][G];
  u64 bars[SLOTS];
  volatile int freed;
  const u16* kv[2][2];
};
// The next chunk, its slot of the ring, and the slot and lap of the last that may still be on its way.
struct Stream {
  int q, slot, tail, parity;
};

__device__ __forceinline__ const u16* weights(const u16* const* table, int layer, int slot) {
  return table[layer * SLOT_W + slot];
}

// Ask for this program's rows of a weight, as whole chunks, as slots become free.
__device__ __forceinline__ void request(Shared& s, unsigned char* ring, Stream& at, const u16* w, int row0,
                                        int rows, int all, int cols, int chunks) {
  const char* from = (const char*)(w + (long)row0 * cols);
  const int bytes = min(rows, all - row0) * cols * 2;
  for (int c = 0; c < chunks; c++) {
    while (at.q >= s.freed + SLOTS);
    if (at.q >= FLYING) {
      wait_full(smem(s.bars + at.tail), at.parity);
      if (++at.tail == SLOTS) {
        at.tail = 0;
        at.parity ^= 1;
      }
    }
    u32 bar = smem(s.bars + at.slot);
    int size = min(CHUNK, bytes - c * CHUNK);
    if (size > 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(size) : "memory");
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
              smem(ring + at.slot * PITCH)),
          "l"(from + c * CHUNK), "r"(size), "r"(bar)
          : "memory");
    } else asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
    at.q++;
    if (++at.slot == SLOTS) at.slot = 0;
  }
}

// part [ROWS, WARPS]
// This warp's share of the products of ROWS rows, which begin at chunk `first`, with xs; part [ROWS, WARPS]. A
// lane reads 8 columns in a row of both operands: in which order columns are summed up is all the same. From row
// HALF on rows are GAP bytes further: the second segment begins with a chunk.
template <int ROWS, int COLS, int HALF = ROWS, int GAP = 0>
__device__ __forceinline__ void products(Shared& s, const unsigned char* ring, int first, int warp,
                                         int lane) {
  constexpr int BLOCKS = (ROWS + 15) / 16, CHUNKS = (ROWS * COLS * 2 + GAP + CHUNK - 1) / CHUNK,
                TURN = apart(COLS), STEPS = (COLS / 64 + WARPS - 1) / WARPS;
  const int slot0 = first % SLOTS, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int c = 0; c < CHUNKS; c += 32)
    if (c + lane < CHUNKS)
      wait_full(smem(s.bars + (first + c + lane) % SLOTS), ((first + c + lane) / SLOTS) & 1);
  __syncwarp();
  const int r = TURN == 1 ? g : (g & ~(1 | TURN)) | ((g & 1) ? TURN : 0) | ((g & TURN) ? 1 : 0);
  float sum[BLOCKS][2][4];
#pragma unroll
  for (int b = 0; b < BLOCKS; b++)
#pragma unroll
    for (int j = 0; j < 4; j++) sum[b][0][j] = sum[b][1][j] = 0.f;
#pragma unroll(BLOCKS > 1 ? 1 : STEPS)
  for (int w = 0; w < STEPS; w++) {
    const int c = (warp + w * WARPS) * 64;
    if (COLS % (64 * WARPS) == 0 || c < COLS) {
      const uint4 x0 = *(const uint4*)(s.xs + c + t * 8), x1 = *(const uint4*)(s.xs + c + 32 + t * 8);
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        uint4 p[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int row = b * 16 + h * 8 + r;
          if (b * 16 + h * 8 < ROWS) {
            const int off = (row * COLS + c + t * 8) * 2 + (row >= HALF ? GAP : 0);
            int slot = slot0 + off / CHUNK;
            if (slot >= SLOTS) slot -= SLOTS;
            const unsigned char* from = ring + slot * PITCH + off % CHUNK;
            p[h][0] = *(const uint4*)from;
            p[h][1] = *(const uint4*)(from + 64);
          } else p[h][0] = p[h][1] = make_uint4(0, 0, 0, 0);
        }
        mma16(sum[b][0], p[0][0].x, p[1][0].x, p[0][0].y, p[1][0].y, x0.x, x0.y);
        mma16(sum[b][1], p[0][1].x, p[1][1].x, p[0][1].y, p[1][1].y, x1.x, x1.y);
        mma16(sum[b][0], p[0][0].z, p[1][0].z, p[0][0].w, p[1][0].w, x0.z, x0.w);
        mma16(sum[b][1], p[0][1].z, p[1][1].z, p[0][1].w, p[1][1].w, x1.z, x1.w);
      }
    }
  }
  if (t == 0) {
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      const int row = b * 16 + r;
      if (ROWS % 8 == 0 || row < ROWS) s.part[row * WARPS + warp] = sum[b][0][0] + sum[b][1][0];
      if (b * 16 + 8 < ROWS && (ROWS % 8 == 0 || row + 8 < ROWS))
        s.part[(row + 8) * WARPS + warp] = sum[b][0][2] + sum[b][1][2];
    }
  }
}
// The sum of all warps' shares of a row.
__device__ __forceinline__ float joined(const Shared& s, int row) {
  float4 a = *(const float4*)(s.part + row * WARPS), b = *(const float4*)(s.part + row * WARPS + 4);
  return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}
// A norm's weight, asked for early: each thread those that it will need.
template <int N>
struct Words {
  u32 w[(N / 2 + THREADS - 1) / THREADS];
};
template <int N>
__device__ __forceinline__ Words<N> own(const u16* from, int tid) {
  Words<N> n;
#pragma unroll
  for (int e = 0; e < (N / 2 + THREADS - 1) / THREADS; e++) {
    int w = tid + e * THREADS;
    if (N / 2 % THREADS == 0 || w < N / 2) n.w[e] = ((const u32*)from)[w];
  }
  return n;
}
// Take N values from all programs, times a norm's weight, into xs; the norm's factor follows the product.
template <int N, bool NORM>
__device__ __forceinline__ void take(Shared& s, const u64* wires, const Words<N>& n, u32 tag, int tid) {
  constexpr int EACH = (N / 2 + THREADS - 1) / THREADS;
  float squares = 0.f;
  u64 v[EACH];
  bool all;
  do {
    all = true;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      int w = tid + e * THREADS;
      if (N / 2 % THREADS == 0 || w < N / 2) v[e] = peek(wires + w);
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      int w = tid + e * THREADS;
      if (N / 2 % THREADS == 0 || w < N / 2) all &= (u32)(v[e] >> 32) == tag;
    }
  } while (!WITHOUT_WAITS && !all);
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    int w = tid + e * THREADS;
    if (N / 2 % THREADS == 0 || w < N / 2) {
      u32 x = (u32)v[e];
      if (NORM) {
        squares += lo(x) * lo(x) + hi(x) * hi(x);
        x = pack(lo(x) * lo(n.w[e]), hi(x) * hi(n.w[e]));
      }
      ((u32*)s.xs)[w] = x;
    }
  }
  if (NORM) {
    squares = wsum(squares);
    if ((tid & 31) == 0) s.squares[tid >> 5] = squares;
  }
  MEET;
}
__device__ __forceinline__ float factor(const Shared& s) {
  float4 a = *(const float4*)s.squares, b = *(const float4*)(s.squares + 4);
  return rsq((((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w))) * (1.f / H) + (float)EPS);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
    layers(u16* out, const u16* x_in, u64* wires_all, const u16* const* table, const u16* norms, u32* epoch,
           const int* kv_lens, const int* blocks, const u16* cos_t, const u16* sin_t) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared& s = *(Shared*)(memory + up(SLOTS * PITCH, 128) * 128);
  unsigned char* ring = memory;
  const int p = blockIdx.x, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane / 4, t = lane % 4;
  if (tid == 0) {
#pragma unroll 1
    for (int i = 0; i < SLOTS; i++)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(smem(s.bars + i)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    s.freed = 0;
    s.kv[0][0] = weights(table, 0, 4);
    s.kv[0][1] = weights(table, 0, 5);
  }
  for (int i = tid; i < 8 * D; i += THREADS) s.q[i] = 0;
  __syncthreads();
  if (warp == WARPS) {
    if (lane == 0 && !WITHOUT_WEIGHTS) {
      Stream at = {0, 0, 0, 0};
      const u16 *a = weights(table, 0, 0), *d = weights(table, 0, 1), *e = weights(table, 0, 2),
                *f = weights(table, 0, 3);
      for (int layer = 0; layer < L; layer++) {
        int next = min(layer + 1, L - 1);
        const u16 *a2 = weights(table, next, 0), *d2 = weights(table, next, 1), *e2 = weights(table, next, 2),
                  *f2 = weights(table, next, 3);
        request(s, ring, at, a, p * RA, RA, QKV, H, CA);
        request(s, ring, at, d, p * RH, RH, H, A, CD);
        request(s, ring, at, e, p * RE, RE, I, H, CE);
        request(s, ring, at, e + (long)I * H, p * RE, RE, I, H, CE);
        request(s, ring, at, f, p * RH, RH, H, I, CF);
        a = a2;
        d = d2;
        e = e2;
        f = f2;
      }
    }
    return;
  }
#define RELEASE(n) \
  { \
    if (tid == 0) s.freed += n; \
  }
  const u32 tag = *epoch + 1;
  const int length = *kv_lens;
  const int share = up(up(length, SPLITS), KEYS * WARPS) * KEYS * WARPS;
  const int kvh = p / SPLITS, split = p % SPLITS;
  const int low = split * share, high = min(low + share, length);
  const bool attends = kvh < KV && low < high;
  float res0 = 0.f, res1 = 0.f;
  const int copy = tid / (RH / 2), mine = tid % (RH / 2) * 2, rh = p * RH + mine, mycopy = p % COPIES;
  const bool owner = copy < COPIES && rh < H;
  if (owner) {
    u32 r = ((const u32*)x_in)[rh / 2];
    res0 = lo(r);
    res1 = hi(r);
    put(wires_all + W_XO + copy * (H / 2) + rh / 2, r, tag);
  }
  const u32 rc = ((const u32*)cos_t)[lane], rn = ((const u32*)sin_t)[lane],
            rc2 = ((const u32*)cos_t)[lane + 32], rn2 = ((const u32*)sin_t)[lane + 32];
  int chunk = 0;
  Words<H> n1 = own<H>(norms, tid), n2;
  for (int layer = 0; layer < L; layer++) {
    u64* wires = wires_all + W_ALL + (long)layer * W_ALL;
    const u16 *kc = s.kv[layer & 1][0], *vc = s.kv[layer & 1][1];
    // Keys of this warp's rows g, values of its keys 2t and 2t + 1, of the first tile: they are older than
    // this step
    uint4 key[W32], val[2][W64];
#define PLACE(n) (((long)blocks[(n) / PAGE] * KV + kvh) * (PAGE * D) + ((n) % PAGE) * D)
#define KEY(n) \
  { \
    bool there = attends && (n) < high && (n) < length - 1; \
    const u16* at = kc + (there ? PLACE(n) : 0) + t * 8; \
    _Pragma("unroll") for (int j = 0; j < W32; j++) key[j] = \
        there ? old(at + j * 32) : make_uint4(0, 0, 0, 0); \
  }
#define VAL(i, n) \
  { \
    bool there = attends && (n) < high && (n) < length - 1; \
    const u16* at = vc + (there ? PLACE(n) : 0) + g * 8; \
    _Pragma("unroll") for (int j = 0; j < W64; j++) val[i][j] = \
        there ? old(at + j * 64) : make_uint4(0, 0, 0, 0); \
  }
    int n0 = low + warp * KEYS;
    KEY(n0 + g)
    VAL(0, n0 + 2 * t) VAL(1, n0 + 2 * t + 1)
        take<H, true>(s, wires - W_ALL + W_XO + mycopy * (H / 2), n1, tag, tid);
    n2 = own<H>(norms + (long)layer * NORMS + H, tid);
    u32 qk[W64];
#pragma unroll
    for (int j = 0; j < W64; j++)
      qk[j] = ((const u32*)(norms + (long)layer * NORMS + 2 * H + (warp < G ? 0 : D)))[lane + j * 32];
    products<RA, H>(s, ring, chunk, warp, lane);
    MEET;
    RELEASE(CA) chunk += CA;
    if (tid < RA / 2 && p * RA + tid * 2 < QKV) {
      float f = factor(s);
      put(wires + W_QKV + (p * RA) / 2 + tid, pack(joined(s, tid * 2) * f, joined(s, tid * 2 + 1) * f), tag);
    }
    if (attends && !WITHOUT_ATTENTION) {
      static_assert(D == 128 && G + 2 <= WARPS, "");
      if (warp < G + 2) {
        const int head = warp < G ? kvh * G + warp : warp == G ? HEADS + kvh : HEADS + KV + kvh;
        u64 w0, w1;
        do {
          w0 = peek(wires + W_QKV + head * D / 2 + lane);
          w1 = peek(wires + W_QKV + head * D / 2 + lane + 32);
        } while (!WITHOUT_WAITS && ((u32)(w0 >> 32) != tag || (u32)(w1 >> 32) != tag));
        u32 a = (u32)w0, b = (u32)w1;
        if (warp <= G) {
          float x0 = lo(a), x1 = hi(a), x2 = lo(b), x3 = hi(b);
          float f = rsq(wsum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3) * (1.f / D) + (float)EPS);
          x0 = rnd(rnd(x0 * f) * lo(qk[0]));
          x1 = rnd(rnd(x1 * f) * hi(qk[0]));
          x2 = rnd(rnd(x2 * f) * lo(qk[1]));
          x3 = rnd(rnd(x3 * f) * hi(qk[1]));
          a = pack(x0 * lo(rc) - x2 * lo(rn), x1 * hi(rc) - x3 * hi(rn));
          b = pack(x2 * lo(rc2) + x0 * lo(rn2), x3 * hi(rc2) + x1 * hi(rn2));
        }
        u32* to = (u32*)(warp < G ? s.q + warp * D : warp == G ? s.k : s.v);
        to[lane] = a;
        to[lane + 32] = b;
      }
      MEET;
      uint4 q[W32];
#pragma unroll
      for (int j = 0; j < W32; j++) q[j] = *(const uint4*)(s.q + g * D + j * 32 + t * 8);
      float mix[W64][4][4], top[2] = {-1e30f, -1e30f}, tot[2] = {0.f, 0.f};
#pragma unroll
      for (int j = 0; j < W64; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) mix[j][i][0] = mix[j][i][1] = mix[j][i][2] = mix[j][i][3] = 0.f;
#pragma unroll 1
      for (; n0 < high; n0 += KEYS * WARPS) {
        if (n0 <= length - 1 && length - 1 < n0 + KEYS) {  // the new token
          const long at = PLACE(length - 1);
          if (n0 + g == length - 1) {
#pragma unroll
            for (int j = 0; j < W32; j++) {
              key[j] = *(const uint4*)(s.k + j * 32 + t * 8);
              *(uint4*)(kc + at + j * 32 + t * 8) = key[j];
            }
          }
#pragma unroll
          for (int i = 0; i < 2; i++)
            if (n0 + 2 * t + i == length - 1) {
#pragma unroll
              for (int j = 0; j < W64; j++) {
                val[i][j] = *(const uint4*)(s.v + j * 64 + g * 8);
                *(uint4*)(vc + at + j * 64 + g * 8) = val[i][j];
              }
            }
        }
        float sc0[4] = {0.f, 0.f, 0.f, 0.f}, sc1[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int j = 0; j < W32; j++) {
          mma16(sc0, key[j].x, 0, key[j].y, 0, q[j].x, q[j].y);
          mma16(sc1, key[j].z, 0, key[j].w, 0, q[j].z, q[j].w);
        }
        KEY(n0 + KEYS * WARPS + g)
        float dec[2];
        u32 wt[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {  // heads 2t + h, the key of row g
          float sc = (sc0[h] + sc1[h]) * (float)(SCALE * 1.4426950408889634);
          if (n0 + g >= high) sc = -1e30f;
          float peak = sc;
#pragma unroll
          for (int m = 4; m < 32; m <<= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, m));
          peak = fmaxf(peak, top[h]);
          dec[h] = ex2(top[h] - peak);
          top[h] = peak;
          float w = ex2(sc - peak);
          tot[h] = tot[h] * dec[h] + w;
          wt[h] = __float_as_uint(w);
        }
        // weights of keys 2t, 2t + 1 of head g: from the lanes of those keys and g's pair of heads
        float pa = __uint_as_float(__shfl_sync(~0u, wt[0], (2 * t) * 4 + g / 2)),
              pb = __uint_as_float(__shfl_sync(~0u, wt[1], (2 * t) * 4 + g / 2));
        float pc = __uint_as_float(__shfl_sync(~0u, wt[0], (2 * t + 1) * 4 + g / 2)),
              pd = __uint_as_float(__shfl_sync(~0u, wt[1], (2 * t + 1) * 4 + g / 2));
        u32 pw = pack((g & 1) ? pb : pa, (g & 1) ? pd : pc);
#pragma unroll
        for (int j = 0; j < W64; j++) {
          const u32 v0[4] = {val[0][j].x, val[0][j].y, val[0][j].z, val[0][j].w},
                    v1[4] = {val[1][j].x, val[1][j].y, val[1][j].z, val[1][j].w};
#pragma unroll
          for (int i = 0; i < 4; i++) {
            mix[j][i][0] *= dec[0];
            mix[j][i][1] *= dec[1];
            mix[j][i][2] *= dec[0];
            mix[j][i][3] *= dec[1];
            mma8(mix[j][i], __byte_perm(v0[i], v1[i], 0x5410), __byte_perm(v0[i], v1[i], 0x7632), pw);
          }
        }
        VAL(0, n0 + KEYS * WARPS + 2 * t) VAL(1, n0 + KEYS * WARPS + 2 * t + 1)
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int m = 4; m < 32; m <<= 1) tot[h] += __shfl_xor_sync(~0u, tot[h], m);
        if (2 * t + h < G) {
          if (g == 0) {
            s.top[warp][2 * t + h] = top[h];
            s.tot[warp][2 * t + h] = tot[h];
          }
#pragma unroll
          for (int j = 0; j < W64; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
              *(float2*)&s.mix[warp][2 * t + h][j * 64 + g * 8 + 2 * i] =
                  make_float2(mix[j][i][h], mix[j][i][2 + h]);
        }
      }
      MEET;
      for (int e = tid; e < G * D; e += THREADS) {
        const int h = e / D, d = e % D;
        float tops[WARPS], peak = -1e30f, sum = 0.f, m = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
          tops[w] = s.top[w][h];
          peak = fmaxf(peak, tops[w]);
        }
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
          float f = ex2(tops[w] - peak);
          sum += f * s.tot[w][h];
          m += f * s.mix[w][h][d];
        }
        const int row = kvh * G + h;
        put(wires + W_PART + (row * D + d) * SPLITS + split, __float_as_uint(__fdividef(m, sum)), tag);
        if (d == 0) put(wires + W_LSE + row * SPLITS + split, __float_as_uint(peak + lg2(sum)), tag);
      }
    }
    {
      constexpr int PER = (A + CTAS - 1) / CTAS, CH = PER + PER % 2;
      static_assert(CH * SPLITS <= THREADS && SPLITS <= 16, "");
      const int ch = p * CH + tid / SPLITS, sp = tid % SPLITS;
      if (tid < CH * SPLITS) {
        const bool used = ch < A && sp * share < length;
        float lse = -1e30f, v = 0.f;
        if (used) {
          const u64 *a = wires + W_LSE + (ch / D) * SPLITS + sp, *b = wires + W_PART + ch * SPLITS + sp;
          u64 x, y;
          do {
            x = peek(a);
            y = peek(b);
          } while (!WITHOUT_WAITS && ((u32)(x >> 32) != tag || (u32)(y >> 32) != tag));
          lse = __uint_as_float((u32)x);
          v = __uint_as_float((u32)y);
        }
        float peak = lse;
#pragma unroll
        for (int m = SPLITS / 2; m; m >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, m));
        float w = ex2(lse - peak);
        v *= w;
#pragma unroll
        for (int m = SPLITS / 2; m; m >>= 1) {
          w += __shfl_xor_sync(~0u, w, m);
          v += __shfl_xor_sync(~0u, v, m);
        }
        v = __fdividef(v, w);
        float other = __shfl_down_sync(~0u, v, SPLITS);
        if (sp < COPIES && ch % 2 == 0 && ch < A)
          put(wires + W_ATT + sp * (A / 2) + ch / 2, pack(v, other), tag);
      }
    }
    take<A, false>(s, wires + W_ATT + mycopy * (A / 2), Words<A>(), tag, tid);
    if (tid < 2) s.kv[(layer + 1) & 1][tid] = weights(table, min(layer + 1, L - 1), 4 + tid);
    products<RH, A>(s, ring, chunk, warp, lane);
    MEET;
    RELEASE(CD) chunk += CD;
    if (owner) {
      res0 = rnd(rnd(joined(s, mine)) + res0);
      res1 = rnd(rnd(joined(s, mine + 1)) + res1);
      put(wires + W_X1 + copy * (H / 2) + rh / 2, pack(res0, res1), tag);
    }
    take<H, true>(s, wires + W_X1 + mycopy * (H / 2), n2, tag, tid);
    n1 = own<H>(norms + (long)min(layer + 1, L - 1) * NORMS, tid);
    products<2 * RE, H, RE, CE * CHUNK - RE * H * 2>(s, ring, chunk, warp, lane);
    MEET;
    RELEASE(2 * CE) chunk += 2 * CE;
    const int ecopy = tid / (RE / 2), emine = tid % (RE / 2) * 2;
    if (ecopy < COPIES && p * RE + emine < I) {
      float f = factor(s), y[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float a = rnd(joined(s, emine + j) * f), b = rnd(joined(s, RE + emine + j) * f);
        y[j] = __fdividef(a, 1.f + ex2(-1.4426950408889634f * a)) * b;
      }
      put(wires + W_H + ecopy * (I / 2) + (p * RE + emine) / 2, pack(y[0], y[1]), tag);
    }
    take<I, false>(s, wires + W_H + mycopy * (I / 2), Words<I>(), tag, tid);
    products<RH, I>(s, ring, chunk, warp, lane);
    MEET;
    RELEASE(CF) chunk += CF;
    if (owner) {
      res0 = rnd(rnd(joined(s, mine)) + res0);
      res1 = rnd(rnd(joined(s, mine + 1)) + res1);
      if (layer == L - 1) ((u32*)out)[rh / 2] = pack(res0, res1);
      else put(wires + W_XO + copy * (H / 2) + rh / 2, pack(res0, res1), tag);
    }
  }
  if (p == 0 && tid == 0) *epoch = tag;
}
