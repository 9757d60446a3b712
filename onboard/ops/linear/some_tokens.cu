// Products of weights [outputs, inputs] and codes of up to 64 tokens, eight-bit floats both, on Hopper GPUs.
//
// Tokens are the 64 rows of `wgmma`, and rows of the weight its columns, as few as it takes that every processor has some:
// programs have GROUPS * WIDTH, and CLUSTER of them, each of which has a part of the inputs, add up their sums. Two warps ask
// the copy engine for blocks of 128 inputs: one for the weight's, before the kernel in front has ended, too, the other for
// the tokens'. The others multiply, in groups of four warps: PARTS of them take turns with blocks, GROUPS have WIDTH rows
// each; with GATED the first one's are gates, and the second's what they multiply. Sums of a block are added up in float32:
// with GROUPED times the scales of the weight's block and the token's, else as they are, and the scales of rows and tokens
// are for the end. Of fewer tokens BOX rows are brought, and the tensor cores read on into what is there besides: its
// products are of rows that nobody stores.
constexpr int TOKENS = 64, BLOCK = 128, ROWS = GROUPS * WIDTH, STAGE = (ROWS + BOX) * BLOCK, CHUNKS = ROWS / 8, ROW = ROWS + 4;
constexpr int WORKERS = 128 * PARTS * GROUPS, THREADS = WORKERS + 64, COLUMNS = GATED ? WIDTH : ROWS;
constexpr int SHARE = TOKENS / CLUSTER, FOURS = COLUMNS / 4, EACH = (SHARE * FOURS + WORKERS - 1) / WORKERS;
constexpr int OWN = (BLOCKS + CLUSTER - 1) / CLUSTER;  // blocks of a program
constexpr int X_SCALES = GROUPED ? OWN + 4 : 1;  // of a token: so that eight tokens' are in different banks

struct alignas(64) Map { u64 words[16]; };
struct Arguments {
  Map weight, x;
  void* out;
  const float *weight_scale, *x_scale;
  const u16 *bias, *residual;
  int tokens, outputs;
};

__device__ __forceinline__ u32 address_of(const void* place) { return (u32)__cvta_generic_to_shared(place); }
__device__ __forceinline__ void begin(u64* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(barrier)) : "memory");
}
__device__ __forceinline__ void expect(u64* barrier, int bytes) {
  asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1; }"
               ::"r"(address_of(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void await(u64* barrier, int phase) {
  asm volatile(
      "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra WAIT; }"
      ::"r"(address_of(barrier)), "r"(phase) : "memory");
}
// A tile of a matrix, from a column and a row on, comes to the program's memory; the barrier counts its bytes.
__device__ __forceinline__ void bring(const Map& map, void* to, int column, int row, u64* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      ::"r"(address_of(to)), "l"(&map), "r"(column), "r"(row), "r"(address_of(barrier)) : "memory");
}
// Rows of 128 bytes, eight of them in 1024, whose sixteenths are exchanged as the copy engine does.
__device__ __forceinline__ u64 matrix_at(const u8* place) {
  return (u64)((address_of(place) & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}
__device__ __forceinline__ void meet_workers() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }
__device__ __forceinline__ void wait_for_inputs() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

struct Memory {
  int tile, rank, low, blocks;  // which rows, which part of the inputs, its first block and how many it has
  u8* ring; u64 *full, *empty; float *row_scales, *bias, *x_scales, *weight_scales;
};

__device__ __forceinline__ int row_of(const Arguments& a, const Memory& m, int group) {
  return GATED ? m.tile * WIDTH + group * a.outputs : m.tile * ROWS + group * WIDTH;
}

// What was in a block's stage before has been multiplied.
__device__ __forceinline__ void await_room(const Memory& m, int block) {
  if (block >= STAGES) await(m.empty + block % STAGES, (block / STAGES - 1) & 1);
}
__device__ __forceinline__ void bring_weights(const Arguments& a, const Memory& m) {
  for (int block = 0; block < m.blocks; block++) {
    u8* to = m.ring + block % STAGES * STAGE;
    u64* full = m.full + block % STAGES;
    await_room(m, block);
    expect(full, STAGE);
    for (int group = 0; group < GROUPS; group++)
      bring(a.weight, to + (BOX + group * WIDTH) * BLOCK, (m.low + block) * BLOCK, row_of(a, m, group), full);
  }
}
__device__ __forceinline__ void bring_inputs(const Arguments& a, const Memory& m) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&a.x));
  wait_for_inputs();
  asm volatile("griddepcontrol.launch_dependents;");
  for (int block = 0; block < m.blocks; block++) {
    await_room(m, block);
    bring(a.x, m.ring + block % STAGES * STAGE, (m.low + block) * BLOCK, 0, m.full + block % STAGES);
  }
}

// Scales of this program's rows, or with GROUPED of each eight of them in each block, and their bias.
__device__ __forceinline__ void bring_scales(const Arguments& a, const Memory& m) {
  const int last = a.outputs * (GATED ? 2 : 1) - 1;
  for (int i = threadIdx.x; i < ROWS; i += WORKERS) {
    const int row = min(row_of(a, m, i / WIDTH) + i % WIDTH, last);
    if (!GROUPED) copy_four(m.row_scales + i, a.weight_scale + row, true);
    if (HAS_BIAS) m.bias[i] = low_of(a.bias[row]);
  }
#pragma unroll
  for (int i = threadIdx.x; GROUPED && i < OWN * CHUNKS; i += WORKERS) {
    const int chunk = i % CHUNKS, row = min(row_of(a, m, chunk / (WIDTH / 8)) + chunk % (WIDTH / 8) * 8, last);
    const int block = m.low + i / CHUNKS;
    copy_four(m.weight_scales + i, a.weight_scale + row / BLOCK * BLOCKS + block, block < BLOCKS);
  }
}
// Scales of tokens, and with GROUPED of each block of theirs.
__device__ __forceinline__ void bring_x_scales(const Arguments& a, const Memory& m) {
  constexpr int STEP = GROUPED && BLOCKS % 4 == 0 && OWN % 4 == 0 ? 4 : 1, EVERY = (GROUPED ? OWN : 1) / STEP;
#pragma unroll
  for (int i = threadIdx.x; i < EVERY * TOKENS; i += WORKERS) {
    const int token = i / EVERY, block = i % EVERY * STEP;
    float* to = m.x_scales + token * X_SCALES + block;
    const float* from = GROUPED ? a.x_scale + token * BLOCKS + m.low + block : a.x_scale + token;
    const bool given = token < a.tokens && (!GROUPED || m.low + block < BLOCKS);
    if (STEP == 4) copy_sixteen(to, from, given);
    else copy_four(to, from, given);
  }
  copies_asked();
}

__device__ __forceinline__ void multiply_blocks(const Memory& m, float (&sums)[WIDTH / 2]) {
  const int group = threadIdx.x / 128 % GROUPS, token = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  for (int block = threadIdx.x / (128 * GROUPS); block < m.blocks; block += PARTS) {
    const int stage = block % STAGES;
    const u8* from = m.ring + stage * STAGE;
    await(m.full + stage, block / STAGES & 1);
    float products[WIDTH / 2];
    multiply_block(products, matrix_at(from), matrix_at(from + (BOX + group * WIDTH) * BLOCK));
    if (threadIdx.x % 32 == 0) arrive(m.empty + stage);
    const float first = GROUPED ? m.x_scales[token * X_SCALES + block] : 1.f;
    const float second = GROUPED ? m.x_scales[(token + 8) * X_SCALES + block] : 1.f;
#pragma unroll
    for (int chunk = 0; chunk < WIDTH / 8; chunk++) {
      float *sum = sums + 4 * chunk, *product = products + 4 * chunk;
      if (GROUPED) {
        const float scale = m.weight_scales[block * CHUNKS + group * (WIDTH / 8) + chunk];
        const float low = scale * first, high = scale * second;
        sum[0] = fmaf(product[0], low, sum[0]), sum[1] = fmaf(product[1], low, sum[1]);
        sum[2] = fmaf(product[2], high, sum[2]), sum[3] = fmaf(product[3], high, sum[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += product[i];
      }
    }
  }
}

__device__ __forceinline__ void keep(const Memory& m, const float (&sums)[WIDTH / 2]) {
  const int group = threadIdx.x / 128 % GROUPS, lane = threadIdx.x % 32, token = threadIdx.x % 128 / 32 * 16 + lane / 4;
  float* to = (float*)m.ring + threadIdx.x / (128 * GROUPS) * TOKENS * ROW + token * ROW + group * WIDTH + lane % 4 * 2;
#pragma unroll
  for (int chunk = 0; chunk < WIDTH / 8; chunk++) {
    *(float2*)(to + 8 * chunk) = make_float2(sums[4 * chunk], sums[4 * chunk + 1]);
    *(float2*)(to + 8 * ROW + 8 * chunk) = make_float2(sums[4 * chunk + 2], sums[4 * chunk + 3]);
  }
}

// Four products of a token, with the scales and the bias of their rows.
__device__ __forceinline__ float4 total(const Memory& m, int token, int column) {
  const float* place = (float*)m.ring + token * ROW + column;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int i = 0; i < CLUSTER * PARTS; i++) {
    const float* from = place + i % PARTS * TOKENS * ROW;
    const float4 more = CLUSTER > 1 ? read_four_at(from, i / PARTS) : *(const float4*)from;
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
  }
  if (!GROUPED) {
    const float4 scale = *(const float4*)(m.row_scales + column);
    const float of_token = m.x_scales[token];
    sum.x *= scale.x * of_token, sum.y *= scale.y * of_token, sum.z *= scale.z * of_token, sum.w *= scale.w * of_token;
  }
  if (HAS_BIAS) {
    const float4 bias = *(const float4*)(m.bias + column);
    sum.x += bias.x, sum.y += bias.y, sum.z += bias.z, sum.w += bias.w;
  }
  return sum;
}

struct Places {  // of the four outputs of a token that a thread stores in a turn
  int token, column;
  i64 place;
  bool inside;
  __device__ __forceinline__ Places(const Arguments& a, const Memory& m, int turn) {
    const int i = threadIdx.x + turn * WORKERS;
    token = m.rank * SHARE + i / FOURS, column = i % FOURS * 4;
    inside = i / FOURS < SHARE && token < a.tokens && m.tile * COLUMNS + column < a.outputs;
    place = (i64)token * a.outputs + m.tile * COLUMNS + column;
  }
};

__device__ __forceinline__ void store(const Arguments& a, const Memory& m, const uint2 (&residual)[EACH]) {
#pragma unroll
  for (int turn = 0; turn < EACH; turn++) {
    const Places to(a, m, turn);
    if (!to.inside) continue;
    float4 y = total(m, to.token, to.column);
    if (GATED) {
      const float4 up = total(m, to.token, to.column + WIDTH);
      y = make_float4(activate<ACTIVATION>(y.x) * up.x, activate<ACTIVATION>(y.y) * up.y,
                      activate<ACTIVATION>(y.z) * up.z, activate<ACTIVATION>(y.w) * up.w);
    }
    if (HAS_RESIDUAL) {
      const uint2 more = residual[turn];
      y.x += low_of(more.x), y.y += high_of(more.x), y.z += low_of(more.y), y.w += high_of(more.y);
    }
    *(uint2*)((u16*)a.out + to.place) = make_uint2(pair(y.x, y.y), pair(y.z, y.w));
  }
}

__device__ __forceinline__ void work(const Arguments& a, const Memory& m) {
  float sums[WIDTH / 2];
#pragma unroll
  for (float& sum : sums) sum = 0.f;
  bring_scales(a, m);
  wait_for_inputs();
  bring_x_scales(a, m);
  uint2 residual[EACH];
#pragma unroll
  for (int turn = 0; HAS_RESIDUAL && turn < EACH; turn++) {
    const Places from(a, m, turn);
    if (from.inside) residual[turn] = *(const uint2*)(a.residual + from.place);
  }
  copies_done<0>();
  meet_workers();
  multiply_blocks(m, sums);
  meet_workers();  // of the ring nobody reads any more
  keep(m, sums);
  if (CLUSTER > 1) meet_cluster();
  else meet_workers();
  store(a, m, residual);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) some_tokens(const __grid_constant__ Arguments a) {
  extern __shared__ u8 memory[];
  Memory m;
  m.tile = blockIdx.x / CLUSTER, m.rank = blockIdx.x % CLUSTER;
  m.low = m.rank * OWN, m.blocks = max(0, min(OWN, BLOCKS - m.low));
  m.ring = memory + (-address_of(memory) & 1023);
  m.full = (u64*)(m.ring + RING), m.empty = m.full + STAGES;
  m.row_scales = (float*)(m.empty + STAGES), m.bias = m.row_scales + ROWS, m.x_scales = m.bias + ROWS;
  m.weight_scales = m.x_scales + X_SCALES * TOKENS;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) begin(m.full + stage, 1), begin(m.empty + stage, 4 * GROUPS);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < WORKERS) {
    work(a, m);
  } else {
    if (threadIdx.x == WORKERS) bring_weights(a, m);
    if (threadIdx.x == WORKERS + 32) bring_inputs(a, m);
    __syncwarp();
    if (CLUSTER > 1) meet_cluster();
  }
  if (CLUSTER > 1) meet_cluster();  // others have read this program's memory
}
