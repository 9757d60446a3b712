// Attention of sequences with one new token each over a paged cache (`cuda_decode_attention.py`), in bfloat16.
//
// Keys and values go from memory to registers, and are a tensor core's operands there (`mma.m16n8k16`, PTX ISA
// 9.7.14.5). A warp takes TILE keys at a time: of the scores rows are query heads and columns are keys, of what is
// mixed rows are channels and columns are heads, so that the first product's sums, as lanes have them, are the
// second one's operand. Which key and which channel a lane's places stand for is free, as long as both operands
// agree; they are chosen so that lanes load sixteen bytes, and pairs of keys meet in one lane.
//
// WARPS warps of a program, times CLUSTER programs, share the keys of a sequence and a key head by turns. Each has
// a running softmax of its own (FlashAttention-2, Dao 2023, arXiv:2307.08691; Flash-Decoding, Dao et al. 2023);
// sums are joined through the program's memory, then through the cluster's. Scores are times log2(e).
//
// Macros: DIM and VALUE_DIM (channels, of eight each), GROUP (query heads of a key head), PAGE, WARPS, CLUSTER,
// RESIDENT, WINDOW and CHUNK (keys that are seen, 0: all), HAS_SINKS, HAS_CAP, HAS_NORMS (of heads, before they turn), SIZE (channels that turn), TURNS
// (as in `rotation_kernels.py`; 0: none), STEP (of tables), TABLE_TYPE and SINK_TYPE (0 bfloat16, 2 float32).
constexpr int TILE = 16, THREADS = 32 * WARPS, UNITS = WARPS * CLUSTER;
constexpr int HEADS = (GROUP + 7) / 8;            // columns of heads, of eight
constexpr int KEY_PIECES = (DIM + 31) / 32;       // sixteen bytes each, of a key that a lane has
constexpr int VALUE_PIECES = (VALUE_DIM + 63) / 64;
constexpr int WORDS = 4 * VALUE_PIECES;           // pairs of channels that a lane has of a value
constexpr int ROW = KEY_PIECES * 32 < VALUE_DIM ? VALUE_DIM : KEY_PIECES * 32;  // channels of a row in shared memory
constexpr int ELEMENTS = HEADS * WORDS * 32;      // fours of sums: two heads, two channels
constexpr int SHARE = ELEMENTS / CLUSTER;         // that a program stores, every CLUSTER-th
constexpr float LOG2E = 1.4426950408889634f, NONE = -3e38f;  // less than any score

__device__ __forceinline__ float power(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

template <int TYPE> struct Number;
template <> struct Number<0> { typedef u16 type; static __device__ float of(u16 v) { return low_of(v); } };
template <> struct Number<2> { typedef float type; static __device__ float of(float v) { return v; } };
typedef Number<TABLE_TYPE> Table;
typedef Number<SINK_TYPE> Sink;

struct Arguments {
  u16* out;
  const u16 *query, *key, *value;
  const int *starts, *lengths, *table;
  const i64* slots;
  u16 *keys, *values;
  const Sink::type* sinks;
  const Table::type *cos, *sin;
  const u16 *query_norm, *key_norm;
  i64 query_token, query_head, key_token, key_head, value_token, value_head, table_row;
  i64 keys_page, keys_head, keys_slot, values_page, values_head, values_slot, cos_token, sin_token;
  float scale, cap, eps;
};

struct Memory {  // of a program
  float4 sums[WARPS][ELEMENTS], given[CLUSTER][SHARE];  // by each program of the cluster, of this one's share
  float peak[WARPS][HEADS * 8], total[WARPS][HEADS * 8];
  float given_peak[CLUSTER][HEADS * 8], given_total[CLUSTER][HEADS * 8];
  uint4 rows[GROUP + 2][ROW / 8];  // queries and the new key, rotated, and the new value
};

struct Program {
  const Arguments& of;
  Memory& memory;
  int lane, warp, g, t, rank, sequence, kv_head, length, first, tile, end;
  i64 token, slot;
  u16 *keys, *values;
  uint4 key[2][KEY_PIECES], value[4][VALUE_PIECES];
  uint4 query[HEADS][KEY_PIECES];
  float peak[HEADS], total[HEADS], mixed[HEADS][WORDS][4];

  __device__ Program(const Arguments& of, Memory& memory) : of(of), memory(memory) {
    lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, rank = blockIdx.x % CLUSTER;
    sequence = blockIdx.y, kv_head = blockIdx.x / CLUSTER;
    keys = of.keys + kv_head * of.keys_head, values = of.values + kv_head * of.values_head;
    for (int h = 0; h < HEADS; h++) {
      peak[h] = NONE, total[h] = 0.f;
      for (int w = 0; w < WORDS; w++)
        for (float& v : mixed[h][w]) v = 0.f;
    }
  }

  __device__ __forceinline__ i64 page_of(int tile) const {
    return of.table[sequence * of.table_row + tile * TILE / PAGE];
  }

  // Keys of a lane: of column g of two products' columns; and of four places of the second product.
  __device__ __forceinline__ int key_at(int n) const { return tile * TILE + g / 2 * 4 + g % 2 + 2 * n; }
  __device__ __forceinline__ int value_at(int i) const { return tile * TILE + 4 * t + i; }
  // Keys that are in the cache and are seen. What others are may be no number.
  __device__ __forceinline__ bool stored(int key) const { return key >= first && key < length - 1; }

  __device__ __forceinline__ void load_keys(i64 page) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const u16* from = keys + page * of.keys_page + key_at(n) % PAGE * of.keys_slot;
#pragma unroll
      for (int j = 0; j < KEY_PIECES; j++) {
        const bool there = stored(key_at(n)) && (t + 4 * j) * 8 < DIM;
        key[n][j] = there ? *(const uint4*)(from + (t + 4 * j) * 8) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ __forceinline__ void load_values(i64 page) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u16* from = values + page * of.values_page + value_at(i) % PAGE * of.values_slot;
#pragma unroll
      for (int c = 0; c < VALUE_PIECES; c++) {
        const bool there = stored(value_at(i)) && (g + 8 * c) * 8 < VALUE_DIM;
        value[i][c] = there ? *(const uint4*)(from + (g + 8 * c) * 8) : make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Eight channels of a head, which sixteen lanes have, normalised and rounded as by `torch_rmsnorm`.
  __device__ __forceinline__ uint4 normed(const uint4& own, const u16* weight, int piece) const {
    float square = 0.f;
#pragma unroll
    for (int w = 0; w < 4; w++) square += low_of(word(own, w)) * low_of(word(own, w)) + high_of(word(own, w)) * high_of(word(own, w));
#pragma unroll
    for (int step = 1; step < HEAD_LANES; step *= 2) square += __shfl_xor_sync(half_warp(), square, step);
    const float by = rsqrtf(square / DIM + of.eps);
    const uint4 weights = piece * 8 < DIM ? *(const uint4*)(weight + piece * 8) : make_uint4(0, 0, 0, 0);
    u32 to[4];
#pragma unroll
    for (int w = 0; w < 4; w++) to[w] = times(pair(low_of(word(own, w)) * by, high_of(word(own, w)) * by), word(weights, w));
    return make_uint4(to[0], to[1], to[2], to[3]);
  }

  static constexpr int HEAD_LANES = 16;  // that have a head's pieces
  __device__ __forceinline__ u32 half_warp() const { return 0xFFFFu << (lane & 16); }

  // The piece that turns with one, from the lane that has it.
  __device__ __forceinline__ uint4 beside_of(const uint4& own, int piece) const {
    const int from = piece * 16 < SIZE ? piece + SIZE / 16 : piece - SIZE / 16;
    u32 to[4];
#pragma unroll
    for (int w = 0; w < 4; w++) to[w] = __shfl_sync(half_warp(), word(own, w), from, HEAD_LANES);
    return make_uint4(to[0], to[1], to[2], to[3]);
  }

  // Eight channels of a head, rotated.
  __device__ __forceinline__ uint4 turned(const uint4& own, int piece) const {
    const int begin = piece * 8;
    uint4 beside = own;
    if (TURNS == 1) beside = beside_of(own, piece);
    if (!TURNS || begin >= SIZE) return own;
    const bool low = begin < SIZE / 2;
    const Table::type *cos = of.cos + token * of.cos_token, *sin = of.sin + token * of.sin_token;
    const u32 mine[4] = {own.x, own.y, own.z, own.w}, other[4] = {beside.x, beside.y, beside.z, beside.w};
    u32 to[4];
#pragma unroll
    for (int w = 0; w < 4; w++) {
      float c[2], s[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int place = TURNS == 1 ? begin + 2 * w + i : begin / 2 + w;
        c[i] = Table::of(cos[place * STEP]), s[i] = Table::of(sin[place * STEP]);
        if (TURNS == 1) c[i] = rounded(c[i]), s[i] = rounded(s[i]);
      }
      const float a = low_of(mine[w]), b = high_of(mine[w]);
      if (TURNS == 1) {
        const float sign = low ? -1.f : 1.f;
        to[w] = pair(a * c[0] + sign * s[0] * low_of(other[w]), b * c[1] + sign * s[1] * high_of(other[w]));
      } else to[w] = pair(a * c[0] - b * s[0], b * c[1] + a * s[1]);
    }
    return make_uint4(to[0], to[1], to[2], to[3]);
  }

  // Eight channels of a query, the new key or the new value.
  __device__ __forceinline__ uint4 given(int row, int piece) const {
    if (row > GROUP) return piece * 8 < VALUE_DIM ? *(const uint4*)(of.value + token * of.value_token + kv_head * of.value_head + piece * 8) : make_uint4(0, 0, 0, 0);
    const u16* from = row < GROUP ? of.query + token * of.query_token + (kv_head * GROUP + row) * of.query_head
                                  : of.key + token * of.key_token + kv_head * of.key_head;
    uint4 own = piece * 8 < DIM ? *(const uint4*)(from + piece * 8) : make_uint4(0, 0, 0, 0);
    if (HAS_NORMS) own = normed(own, row < GROUP ? of.query_norm : of.key_norm, piece);
    return turned(own, piece);
  }

  // What is given to where all warps find it.
  __device__ __forceinline__ void prepare() {
    for (int i = threadIdx.x; i < (GROUP + 2) * HEAD_LANES; i += THREADS) {
      const uint4 piece = given(i / HEAD_LANES, i % HEAD_LANES);
      if (i % HEAD_LANES < ROW / 8) memory.rows[i / HEAD_LANES][i % HEAD_LANES] = piece;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < HEADS; h++)
#pragma unroll
      for (int j = 0; j < KEY_PIECES; j++)
        query[h][j] = h * 8 + g < GROUP ? memory.rows[h * 8 + g][t + 4 * j] : make_uint4(0, 0, 0, 0);
  }

  // Put the new key and value among a tile's, and into the cache.
  __device__ __forceinline__ void take_new() {
    u16* to = keys + slot / PAGE * of.keys_page + slot % PAGE * of.keys_slot;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int j = 0; j < KEY_PIECES; j++) {
        const int piece = t + 4 * j;
        if (key_at(n) != length - 1 || piece * 8 >= DIM) continue;
        key[n][j] = memory.rows[GROUP][piece];
        *(uint4*)(to + piece * 8) = key[n][j];
      }
    to = values + slot / PAGE * of.values_page + slot % PAGE * of.values_slot;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int c = 0; c < VALUE_PIECES; c++) {
        const int piece = g + 8 * c;
        if (value_at(i) != length - 1 || piece * 8 >= VALUE_DIM) continue;
        value[i][c] = memory.rows[GROUP + 1][piece];
        *(uint4*)(to + piece * 8) = value[i][c];
      }
  }

  __device__ __forceinline__ float logit(float score, int i) const {
    const int key = value_at(i);
    score *= of.scale;
    if (HAS_CAP) score = of.cap * tanhf(score / of.cap);
    return key >= first && key < length ? score * LOG2E : NONE;
  }

  // Scores of heads g and 8 + g, and keys 4 t to 4 t + 3.
  __device__ __forceinline__ void score(float (&to)[HEADS][4]) const {
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float some[4] = {}, more[4] = {};
#pragma unroll
      for (int j = 0; j < KEY_PIECES; j++) {
        const uint4 q = query[0][j], p = HEADS > 1 ? query[HEADS - 1][j] : make_uint4(0, 0, 0, 0), k = key[n][j];
        multiply(some, q.x, p.x, q.y, p.y, k.x, k.y);
        multiply(more, q.z, p.z, q.w, p.w, k.z, k.w);
      }
#pragma unroll
      for (int h = 0; h < HEADS; h++)
#pragma unroll
        for (int i = 0; i < 2; i++) to[h][2 * n + i] = logit(some[2 * h + i] + more[2 * h + i], 2 * n + i);
    }
  }

  // Weights in place of scores; what was summed up shrinks as the peak grows.
  __device__ __forceinline__ void weigh(float (&scores)[4], int h) {
    float high = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
    high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
    high = fmaxf(peak[h], fmaxf(high, __shfl_xor_sync(~0u, high, 2)));  // a number: a tile has a key that is seen
    const float decay = power(peak[h] - high);
    peak[h] = high;
    total[h] *= decay;
#pragma unroll
    for (float& v : scores) v = power(v - high), total[h] += v;
    const float left = __shfl_sync(~0u, decay, 8 * t), right = __shfl_sync(~0u, decay, 8 * t + 4);
#pragma unroll
    for (int w = 0; w < WORDS; w++)
#pragma unroll
      for (int i = 0; i < 4; i++) mixed[h][w][i] *= i % 2 ? right : left;
  }

  __device__ __forceinline__ static u32 word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

  __device__ __forceinline__ void mix(const float (&weights)[HEADS][4]) {
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 even = word(value[2 * i][w / 4], w % 4), odd = word(value[2 * i + 1][w / 4], w % 4);
        a[2 * i] = __byte_perm(even, odd, 0x5410), a[2 * i + 1] = __byte_perm(even, odd, 0x7632);
      }
#pragma unroll
      for (int h = 0; h < HEADS; h++)
        multiply(mixed[h][w], a[0], a[1], a[2], a[3], pair(weights[h][0], weights[h][1]), pair(weights[h][2], weights[h][3]));
    }
  }

  __device__ __forceinline__ void attend() {
    while (tile < end) {
      const int now = tile, next = min(tile + UNITS, end);
      const i64 page = next < end ? page_of(next) : 0;
      if (now * TILE + TILE >= length) take_new();
      float scores[HEADS][4];
      score(scores);
      if (next < end) tile = next, load_keys(page), tile = now;
#pragma unroll
      for (int h = 0; h < HEADS; h++) weigh(scores[h], h);
      mix(scores);
      tile = next;
      if (next < end) load_values(page);
    }
  }

  // Sums of the program's warps, of heads 2 t and 2 t + 1 and two channels, to the programs that store them: to write
  // there is done sooner than to read there, and nobody has to wait for others' reading.
  __device__ __forceinline__ void join() {
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      total[h] += __shfl_xor_sync(~0u, total[h], 1);
      total[h] += __shfl_xor_sync(~0u, total[h], 2);
      if (t == 0) memory.peak[warp][h * 8 + g] = peak[h], memory.total[warp][h * 8 + g] = total[h];
#pragma unroll
      for (int w = 0; w < WORDS; w++)
        memory.sums[warp][(h * WORDS + w) * 32 + lane] = make_float4(mixed[h][w][0], mixed[h][w][1], mixed[h][w][2], mixed[h][w][3]);
    }
    __syncthreads();
    if (CLUSTER > 1) wait_for_cluster();  // all of its programs are there
    for (int e = threadIdx.x; e < ELEMENTS; e += THREADS) {
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
      const int head = e / (32 * WORDS) * 8 + 2 * t;
      float high[2] = {NONE, NONE}, all[2] = {0.f, 0.f};
#pragma unroll
      for (int w = 0; w < WARPS; w++)
        for (int i = 0; i < 2; i++) high[i] = fmaxf(high[i], memory.peak[w][head + i]);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        float by[2];
        for (int i = 0; i < 2; i++) {
          by[i] = power(memory.peak[w][head + i] - high[i]);
          all[i] += by[i] * memory.total[w][head + i];
        }
        const float4 v = memory.sums[w][e];
        sum.x += by[0] * v.x, sum.y += by[1] * v.y, sum.z += by[0] * v.z, sum.w += by[1] * v.w;
      }
      give(memory.given[rank][e / CLUSTER], sum, e % CLUSTER);
      if (e % (32 * WORDS) < 32 && g < CLUSTER)
        for (int i = 0; i < 2; i++) give(memory.given_peak[rank][head + i], high[i], g), give(memory.given_total[rank][head + i], all[i], g);
    }
  }

  template <typename T> __device__ __forceinline__ static void give(T& to, const T& v, int rank) {  // to a program of the cluster
    if (CLUSTER == 1) to = v;
    else write_at(&to, v, rank);
  }
  __device__ __forceinline__ static void meet() {
    if (CLUSTER > 1) meet_cluster();
    else __syncthreads();
  }

  // Store what the programs of the cluster have come to, a share of it each.
  __device__ __forceinline__ void finish() {
    for (int mine = threadIdx.x; mine < SHARE; mine += THREADS) {
      const int e = mine * CLUSTER + rank;
      const int at = e % 32, w = e / 32 % WORDS, head = e / (32 * WORDS) * 8 + at % 4 * 2;
      const int channel = (at / 4 + w / 4 * 8) * 8 + w % 4 * 2;
      if (head >= GROUP || channel >= VALUE_DIM) continue;
      float4 part[CLUSTER];
      float high[2][CLUSTER], all[2][CLUSTER];
#pragma unroll
      for (int c = 0; c < CLUSTER; c++) {
        part[c] = memory.given[c][mine];
        for (int i = 0; i < 2; i++) high[i][c] = memory.given_peak[c][head + i], all[i][c] = memory.given_total[c][head + i];
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        if (head + i >= GROUP) continue;
        const int q_head = kv_head * GROUP + head + i;
        float most = NONE, sum = 0.f, low = 0.f, up = 0.f;
        if (HAS_SINKS) most = Sink::of(of.sinks[q_head]) * LOG2E;
        const float sink = most;
#pragma unroll
        for (int c = 0; c < CLUSTER; c++) most = fmaxf(most, high[i][c]);
        if (HAS_SINKS) sum = power(sink - most);
#pragma unroll
        for (int c = 0; c < CLUSTER; c++) {
          const float by = power(high[i][c] - most);
          sum += by * all[i][c];
          low += by * (i ? part[c].y : part[c].x), up += by * (i ? part[c].w : part[c].z);
        }
        u16* to = of.out + ((token * (gridDim.x / CLUSTER) * GROUP) + q_head) * VALUE_DIM + channel;
        *(u32*)to = pair(low / sum, up / sum);
      }
    }
  }

  __device__ __forceinline__ void run() {
    token = of.starts[sequence];
    if (of.starts[sequence + 1] == token) return;
    length = of.lengths[sequence], slot = of.slots[token];
    first = max(WINDOW ? length - WINDOW : 0, CHUNK ? (length - 1) / (CHUNK ? CHUNK : 1) * CHUNK : 0);
    tile = first / TILE + rank * WARPS + warp, end = (length + TILE - 1) / TILE;
    if (CLUSTER > 1) arrive_at_cluster();
    if (tile < end) {
      const i64 page = page_of(tile);
      load_keys(page);
      load_values(page);
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    prepare();
    attend();
    join();
    meet();
    finish();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) decode_attention(const __grid_constant__ Arguments of) {
  extern __shared__ uint4 shared[];
  Program(of, *(Memory*)shared).run();
}
