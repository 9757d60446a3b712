// Weights of four bits (`four_bits.py`) or eight (E4M3) over one token, or at most eight: a linear layer, or
// experts of one token.
//
// Words go from memory to registers, and are a tensor core's operand there (`mma.m16n8k16`, PTX ISA 9.7.14.5:
// weights on its long side, tokens on its short one). Lanes 4 g to 4 g + 3 of a warp have a run's sixteen words
// of rows g and g + 8. A code becomes a tiny bfloat16 number with the code in its last bits: integers in the last
// four (times 2^-133), floats with exponent and mantissa in their places (times 2^-126); tensor cores keep
// subnormal numbers. Inputs are made large in turn, and zeros subtracted as sums of inputs. A run has sixteen words
// of a row, whatever their bits: 128 inputs, or 64.
//
// Of one token the operand's columns are groups of inputs that share a scale: column c has the inputs of
// group c and zeros elsewhere, so that a product holds eight groups' sums apart, and scales are applied once.
//
// PARTS warps of a program, times CLUSTER programs, share a row's inputs; HEIGHT warps have sixteen rows each.
// A program goes from tile to tile of rows; BATCH runs of words are on their way while as many are computed.
//
// Macros beside these: BITS, TOKENS (1 or 8), INTEGERS, GROUP and GROUPS (inputs that share a scale; groups of a
// run), SCALED_ROWS (that share scales),
// SCALE_TYPE, ROUTING_TYPE, SLOTS (experts whose outputs are added up, or 1), SUMMED, GATED, ORDER, ACTIVATION, EARLY, RESIDENT,
// and HAS_ZERO, HAS_WHOLE, HAS_BIAS, HAS_RESIDUAL, HAS_NORM, HAS_LIMIT, HAS_ALPHA.
constexpr int WARPS = PARTS * HEIGHT, THREADS = 32 * WARPS, EACH = PARTS / SLOTS;
constexpr int ROWS = 16 * HEIGHT, ROLES = GATED ? 2 : 1, CHANNELS = ROWS / ROLES;
constexpr bool MANY = TOKENS > 1;
constexpr bool PAIRED = MANY && GROUPS > 1;  // operands of two neighbouring words, not of a word's halves
constexpr int PLANES = 16 / BITS, ITEMS = RUN / 8;                        // of a word's half; eights of inputs of a run
constexpr int PLANE = MANY ? 512 : GROUPS == 1 ? 64 : 128;                // bytes of a plane's inputs
constexpr int KEPT = PLANES * PLANE;                                      // bytes of a run's inputs
constexpr int COLUMNS = 8 / GROUPS < BATCH ? 8 / GROUPS : BATCH;          // runs whose groups have columns at once
constexpr int SETS = BATCH / COLUMNS;                                     // of such runs in a batch
constexpr int SCALES = MANY ? (BATCH * GROUPS + 3) / 4 : SETS;            // of a row, that a lane has: one each, or two

template <typename T> struct OfGroups {  // what a lane has of the groups of its rows
  T one[SCALES];  // of some tokens: of a run's groups in turn
  Neighbours<T> two[SCALES];  // of one: of the groups of its columns
};

struct Words {
  uint4 row[2][BATCH];
  OfGroups<scale_t> scale[2];
#if HAS_ZERO
  OfGroups<u8> zero[2];
#endif
};

struct Arguments {
  u16* out;
  const u16* x;
  const uint4* weight;
  const scale_t* scale;
  const u8* zero;
  const float* whole;
  const u16 *bias, *residual, *norm;
  const i64* chosen;
  const routing_t* routing;
  int tokens, outputs, inputs, groups, tiles, pairs, experts;
  u32 four;
  float eps, limit, alpha, offset;
};

struct Program {
  const Arguments& of;
  int lane, warp, g, t, part, height, slot, rank, programs;
  int all, each, begin, runs;  // runs of a row; of a warp's part of it; a program's: where they begin, how many
  int first, last, batches;    // a warp's: where they begin in the program's, how many there are
  char* kept;                  // inputs [slots][runs][KEPT], and a run of zeros
  float *sums, *parts;         // of groups' inputs [slots][runs][GROUPS][TOKENS]; of rows [2][PARTS][TOKENS][ROWS]
  i64 expert;
  const uint4* words[2];
  i64 row[2];
  int tile, ahead, ahead_batch, batch, buffer;
  float y[MANY ? 4 : 2];

  __device__ Program(const Arguments& of, char* shared) : of(of), kept(shared) {
    lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    part = warp % PARTS, height = warp / PARTS, slot = part % SLOTS, rank = 0;
    if (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    programs = gridDim.x / CLUSTER;
    all = (of.inputs + RUN - 1) / RUN, each = (all + EACH * CLUSTER - 1) / (EACH * CLUSTER);
    begin = min(rank * EACH * each, all), runs = min(all - begin, EACH * each);
    first = part / SLOTS * each, last = max(0, min(each, runs - first)), batches = (each + BATCH - 1) / BATCH;
    sums = (float*)(kept + (SLOTS * EACH * each + 1) * KEPT);
    parts = sums + (INTEGERS ? SLOTS * EACH * each * GROUPS * TOKENS : 0);
    tile = ahead = blockIdx.x / CLUSTER, ahead_batch = batch = buffer = 0;
    for (float& v : y) v = 0.f;
  }

  __device__ __forceinline__ i64 expert_of(int pair) const {  // -1: none
    if (!of.experts) return 0;
    const i64 expert = pair < of.pairs ? of.chosen[pair] : -1;
    return expert < of.experts ? expert : -1;
  }

  // The weight's row that a row of a tile is. Rows g and g + 8 are a gate and what it multiplies.
  __device__ __forceinline__ i64 weight_row(i64 expert, int tile, int row) const {
    const i64 above = max(expert, (i64)0) * of.outputs * ROLES;
    if (!GATED) return above + min(tile * CHANNELS + row, of.outputs - 1);
    const int channel = min(tile * CHANNELS + row / 16 * 8 + row % 8, of.outputs - 1), up = row / 8 % 2;
    return above + (ORDER == 2 ? 2 * channel + up : channel + (ORDER == 1 ? 1 - up : up) * of.outputs);
  }

  __device__ __forceinline__ void go_to(int tile) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      row[h] = weight_row(expert, tile, height * 16 + g + 8 * h);
      words[h] = of.weight + (row[h] * all + min(begin + first, all - 1)) * 4 + t;
    }
  }

  template <typename T> __device__ __forceinline__ void load_groups(OfGroups<T>& to, const T* row) const {
    const int start = (begin + first + ahead_batch * BATCH) * GROUPS;
#pragma unroll
    for (int i = 0; i < SCALES; i++) {
      const int group = start + (MANY ? 4 * i + t : i * COLUMNS * GROUPS + 2 * t);
      if (MANY) to.one[i] = row[min(GROUP > RUN ? group * RUN / GROUP : group, of.groups - 1)];
      else to.two[i].load(row, group, of.groups);
    }
  }

  // Load the next batch of words, which may be of the next tile.
  __device__ __forceinline__ void load(Words& to) {
    const int skipped = min(ahead_batch * BATCH, max(last - 1, 0)), rest = max(last - skipped, 1);
#pragma unroll
    for (int r = 0; r < BATCH; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) stream(to.row[h][r], words[h] + (skipped + min(r, rest - 1)) * 4);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      load_groups(to.scale[h], of.scale + row[h] / SCALED_ROWS * of.groups);
#if HAS_ZERO
      load_groups(to.zero[h], of.zero + row[h] * of.groups);
#endif
    }
    if (++ahead_batch < batches) return;
    ahead_batch = 0;
    ahead = min(ahead + programs, of.tiles - 1);
    go_to(ahead);
  }

  __device__ __forceinline__ float* squares() const { return parts + 2 * PARTS * TOKENS * ROWS; }  // of inputs [runs + 1][TOKENS], at last of all

  // Sums of squares of the program's inputs of each row, from those of its runs.
  __device__ __forceinline__ void add_up_squares() const {
    for (int row = warp; row < TOKENS; row += WARPS) {
      float sum = 0.f;
      for (int run = lane; run < EACH * each; run += 32) sum += squares()[run * TOKENS + row];
      for (int i = 16; i; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
      if (lane == 0) squares()[EACH * each * TOKENS + row] = sum;
    }
  }

  __device__ __forceinline__ float inverse_of(int row) const {  // of a row's root mean square
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) sum += there(squares() + EACH * each * TOKENS + row, c);
    return rsqrtf(sum / of.inputs + of.eps);
  }

  // Put eight inputs of a row, four of each of two planes, where products find them. A norm's factor that a row's
  // inputs share comes to their products, when all squares are known.
  __device__ __forceinline__ void keep(int row, int run, int i, const uint2 (&in)[2], const uint2 (&by)[2]) {
    float v[8], square = 0.f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float from[4] = {low_of(in[h].x), high_of(in[h].x), low_of(in[h].y), high_of(in[h].y)};
      const float weight[4] = {low_of(by[h].x), high_of(by[h].x), low_of(by[h].y), high_of(by[h].y)};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        v[h * 4 + j] = HAS_NORM ? rounded(from[j] * weight[j]) : from[j];
        square += from[j] * from[j];
      }
    }
    if (HAS_NORM) {
      for (int j = ITEMS / 2; j; j /= 2) square += __shfl_xor_sync(__activemask(), square, j);
      if (i == 0) squares()[run * TOKENS + row] = square;
    }
    if (INTEGERS) add_up(row, run, i, v);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] *= INTEGERS && (PAIRED ? j / 4 : i / 4 % 2) ? LARGE / 16 : LARGE;
    char* here = kept + (MANY ? run : row * EACH * each + run) * KEPT;
    if (BITS == 8) {  // two words, which lie side by side, of both planes
      here += (MANY ? row * 64 : 0) + i * 8;
#pragma unroll
      for (int p = 0; p < 2; p++) *(uint2*)(here + p * PLANE) = make_uint2(pair(v[p], v[2 + p]), pair(v[4 + p], v[6 + p]));
      return;
    }
    uint4* to = (uint4*)here;
    if (!MANY && GROUPS > 1) {  // a word's halves are of two groups
      to[2 * i] = make_uint4(pair(v[0], 0), pair(v[1], 0), pair(v[2], 0), pair(v[3], 0));
      to[2 * i + 1] = make_uint4(pair(0, v[4]), pair(0, v[5]), pair(0, v[6]), pair(0, v[7]));
      return;
    }
    to[MANY ? i / 4 * 32 + row * 4 + i % 4 : i] =
        PAIRED ? make_uint4(pair(v[0], v[1]), pair(v[2], v[3]), pair(v[4], v[5]), pair(v[6], v[7]))
               : make_uint4(pair(v[0], v[4]), pair(v[1], v[5]), pair(v[2], v[6]), pair(v[3], v[7]));
  }

  // Add up the inputs of groups, of which sixteen neighbouring lanes have a run.
  __device__ __forceinline__ void add_up(int row, int run, int i, const float (&v)[8]) {
    constexpr bool together = GROUPS == 1 || PAIRED;
    constexpr int lanes = GROUPS == 1 ? 16 : PAIRED || GROUPS > 2 ? 16 / (PAIRED ? GROUPS : GROUPS / 2) : 16;
    float low = v[0] + v[1] + v[2] + v[3], high = v[4] + v[5] + v[6] + v[7];
    if (together) low += high;
#pragma unroll
    for (int j = 1; j < lanes; j *= 2) {
      low += __shfl_xor_sync(__activemask(), low, j);
      if (!together) high += __shfl_xor_sync(__activemask(), high, j);
    }
    if (i % lanes) return;
    float* to = sums + (MANY ? run : row * EACH * each + run) * GROUPS * TOKENS + (MANY ? row : 0);
    to[i / lanes * TOKENS] = low / BACK;
    if (!together) to[(GROUPS / 2 + i / lanes) * TOKENS] = high / BACK;
  }

  // Inputs, as products take them, of the program's runs.
  __device__ __forceinline__ void prepare() {
    constexpr int TOGETHER = MANY ? 4 : 1, AHEAD = MANY ? 1 : HAS_NORM ? 2 : 4;  // rows, and places, that are loaded at once
    constexpr int APART = BITS == 8 ? 4 : PAIRED ? 16 : 64;  // of the two fours that are kept together
    const int held = EACH * each, places = held * ITEMS, count = (SUMMED ? SLOTS : TOKENS) / TOGETHER * places;
    for (int start = threadIdx.x; start < count; start += THREADS * AHEAD) {
      uint2 in[AHEAD][TOGETHER][2], by[AHEAD][2];
#pragma unroll
      for (int j = 0; j < AHEAD; j++) {
        const int i = start + j * THREADS, first = i / places * TOGETHER, run = i % places / ITEMS, item = i % ITEMS;
        const int k = (begin + run) * RUN + (BITS == 8 ? item * 8 : item / 4 * (PAIRED ? 32 : 16) + item % 4 * 4);
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const bool there = i < count && run < runs && k + h * APART < of.inputs;
          by[j][h] = HAS_NORM && there ? *(const uint2*)(of.norm + k + h * APART) : make_uint2(0, 0);
#pragma unroll
          for (int r = 0; r < TOGETHER; r++) {
            const bool given = there && first + r < (SUMMED ? of.pairs : of.tokens);
            in[j][r][h] = given ? *(const uint2*)(of.x + (i64)(first + r) * of.inputs + k + h * APART) : make_uint2(0, 0);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < AHEAD; j++) {
        const int i = start + j * THREADS;
        if (i >= count) break;
#pragma unroll
        for (int r = 0; r < TOGETHER; r++) keep(i / places * TOGETHER + r, i % places / ITEMS, i % ITEMS, in[j][r], by[j]);
      }
    }
    if (!MANY)
      for (int i = threadIdx.x; i < KEPT / 16; i += THREADS) ((uint4*)(kept + SLOTS * held * KEPT))[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    if (HAS_NORM) add_up_squares();
  }

  // Products of one token: columns are groups.
  __device__ __forceinline__ void add_groups(const Words& has) {
    const char* none = kept + SLOTS * EACH * each * KEPT + t * (PLANE / 4);
    const char* mine = kept + (slot * EACH * each + first) * KEPT + t * (PLANE / 4);
    if (GROUPS > 1 && g % GROUPS >= GROUPS / 2) mine += 16;
#pragma unroll
    for (int c = 0; c < SETS; c++) {
      float some[4] = {}, more[4] = {};
#pragma unroll
      for (int r = 0; r < COLUMNS; r++) {
        const int run = batch * BATCH + c * COLUMNS + r;
        const bool here = g / GROUPS == r && run < last;
        uint4 a = has.row[0][c * COLUMNS + r], b = has.row[1][c * COLUMNS + r];
#pragma unroll
        for (int p = 0; p < PLANES; p++) {
          const bool mine_is = here && (GROUPS <= 2 || g % (GROUPS / 2) == p * (GROUPS / 2) / 4);
          const uint4 in = *(const uint4*)((mine_is ? mine + run * KEPT : none) + p * PLANE);
          if (p == 2) shift(a), shift(b);
          if (p % 2) multiply_planes<1>(some, more, a, b, in, of.four);
          else multiply_planes<0>(some, more, a, b, in, of.four);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int column = 2 * t + i, run = batch * BATCH + c * COLUMNS + column / GROUPS;
        float sum = 0.f;
        if (INTEGERS && column < COLUMNS * GROUPS && run < last)
          sum = sums[(slot * EACH * each + first + run) * GROUPS + column % GROUPS];
#pragma unroll
        for (int h = 0; h < 2; h++)
          y[h] += (some[2 * h + i] + more[2 * h + i] - zero_of(has, h, c, i) * sum) * number(has.scale[h].two[c].at(i));
      }
    }
  }

  __device__ __forceinline__ static float zero_of(const Words& has, int h, int c, int i) {
#if HAS_ZERO
    return MANY ? has.zero[h].one[c] : has.zero[h].two[c].at(i);
#else
    return 8.f;
#endif
  }

  // Products of some tokens: each group's sums are scaled by what one lane of four has.
  __device__ __forceinline__ void add_tokens(const Words& has) {
#pragma unroll
    for (int r = 0; r < BATCH; r++) {
      const int run = batch * BATCH + r;
      if (run >= last) break;
      const char* mine = kept + (first + run) * KEPT + lane * 16;
      uint4 a = has.row[0][r], b = has.row[1][r];
      constexpr int STEPS = GROUPS > 4 ? 4 : GROUPS, EACH_STEP = PLANES / STEPS;
#pragma unroll
      for (int q = 0; q < STEPS; q++) {
        float some[4] = {}, more[4] = {};
#pragma unroll
        for (int p = q * EACH_STEP; p < (q + 1) * EACH_STEP; p++) {
          const uint4 in = *(const uint4*)(mine + p * PLANE);
          if (PAIRED) {
            const u32 byte = p | (p + 4) << 8;  // byte p of two words, a half each
            const u32 a0 = __byte_perm(a.x, a.y, byte), a1 = __byte_perm(a.z, a.w, byte);
            const u32 b0 = __byte_perm(b.x, b.y, byte), b1 = __byte_perm(b.z, b.w, byte);
            multiply(some, decode<0>(a0, of.four), decode<0>(b0, of.four), decode<0>(a1, of.four), decode<0>(b1, of.four), in.x, in.y);
            multiply(more, decode<1>(a0, of.four), decode<1>(b0, of.four), decode<1>(a1, of.four), decode<1>(b1, of.four), in.z, in.w);
          } else {
            if (p == 2) shift(a), shift(b);
            if (p % 2) multiply_planes<1>(some, more, a, b, in, of.four);
            else multiply_planes<0>(some, more, a, b, in, of.four);
          }
        }
        if (GROUPS == 8) {  // a plane is a group
          scale_tokens(has, some, r * GROUPS + 2 * q, run, 2 * q);
          scale_tokens(has, more, r * GROUPS + 2 * q + 1, run, 2 * q + 1);
        } else {
#pragma unroll
          for (int i = 0; i < 4; i++) some[i] += more[i];
          scale_tokens(has, some, r * GROUPS + q, run, q);
        }
      }
    }
  }

  __device__ __forceinline__ void scale_tokens(const Words& has, const float (&some)[4], int at, int run, int group) {
    const int from = (lane & ~3) | at % 4;
    float2 sum = make_float2(0.f, 0.f);
    if (INTEGERS) sum = *(const float2*)(sums + ((first + run) * GROUPS + group) * TOKENS + 2 * t);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float scale = __shfl_sync(~0u, number(has.scale[h].one[at / 4]), from);
      const float zero = HAS_ZERO ? __shfl_sync(~0u, zero_of(has, h, at / 4, 0), from) : 8.f;
      y[MANY ? 2 * h : h] += (some[2 * h] - zero * sum.x) * scale;
      y[MANY ? 2 * h + 1 : h] += (some[2 * h + 1] - zero * sum.y) * scale;
    }
  }

  __device__ __forceinline__ void meet() {  // all warps that have parts of the same rows
    if (CLUSTER > 1) meet_cluster();
    else __syncthreads();
  }

  __device__ __forceinline__ static float there(const float* from, int rank) {  // what a program of the cluster has
    return CLUSTER == 1 ? *from : read_at(from, rank);
  }

  __device__ __forceinline__ float total(int token, int row, int slot) const {
    float v = 0.f;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++)
#pragma unroll
      for (int q = 0; q < EACH; q++) {
        const float* from = parts + ((buffer * PARTS + q * SLOTS + slot) * TOKENS + token) * ROWS + row;
        v += there(from, c);
      }
    return v * BACK;
  }

  // What a row of an expert brings to a token.
  __device__ __forceinline__ float brought(int token, int row, int slot, i64 expert) const {
    float v = total(token, row, slot);
    if (HAS_NORM) v *= inverse_of(token);
    const i64 at = weight_row(expert, tile, row);
    if (HAS_WHOLE) v *= of.whole[at];
    if (HAS_BIAS) v += low_of(of.bias[at]);
    return v;
  }

  __device__ __forceinline__ float result(int token, int channel) const {
    const int row = GATED ? channel / 8 * 16 + channel % 8 : channel;
    float v = 0.f;
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      const i64 expert = SUMMED ? expert_of(s) : this->expert;
      if (SUMMED && expert < 0) continue;
      v += brought(token, row, s, expert) * (SUMMED ? weight_of(of.routing[s]) : 1.f);
    }
    if (HAS_LIMIT) v = fminf(v, of.limit);
    v = HAS_ALPHA ? v / (1.f + __expf(-of.alpha * v)) : activate(v);
    if (!GATED) return v;
    float up = brought(token, row + 8, 0, expert);
    if (HAS_LIMIT) up = fminf(fmaxf(up, -of.limit), of.limit);
    return v * (up + of.offset);
  }

  // Add up the parts of a tile's rows, and store what becomes of them.
  __device__ __forceinline__ void finish() {
    float* to = parts + (buffer * PARTS + part) * TOKENS * ROWS + height * 16 + g;
#pragma unroll
    for (int i = 0; i < (MANY ? 4 : 2); i++) {
      if (MANY) to[(2 * t + i % 2) * ROWS + i / 2 * 8] = y[i];
      else {
        y[i] += __shfl_xor_sync(~0u, y[i], 1);
        y[i] += __shfl_xor_sync(~0u, y[i], 2);
        if (t == 0) to[8 * i] = y[i];
      }
      y[i] = 0.f;
    }
    meet();
    for (int i = threadIdx.x * CLUSTER + rank; i < CHANNELS * TOKENS; i += THREADS * CLUSTER) {
      const int token = i / CHANNELS, channel = tile * CHANNELS + i % CHANNELS;
      if (channel >= of.outputs || token >= of.tokens) continue;
      float v = result(token, i % CHANNELS);
      const i64 place = (i64)(token + blockIdx.y) * of.outputs + channel;
      if (HAS_RESIDUAL) v += low_of(of.residual[place]);
      of.out[place] = (u16)pair(v, 0.f);
    }
    buffer ^= 1;
    tile += programs;
  }

  __device__ __forceinline__ void compute(const Words& has) {
    if (MANY) add_tokens(has);
    else add_groups(has);
    if (++batch < batches) return;
    batch = 0;
    finish();
  }

  __device__ __forceinline__ void run() {
    if (!EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");
    expert = expert_of(SUMMED ? slot : blockIdx.y);
    const int steps = (of.tiles - tile + programs - 1) / programs * batches;
    Words even, odd;
    go_to(tile);
    load(even);
    if (EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    prepare();
    for (int step = 0; step < steps; step += 2) {
      load(odd);
      compute(even);
      if (step + 1 == steps) break;
      load(even);
      compute(odd);
    }
    if (CLUSTER > 1) meet();  // others read what this program has
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) few_tokens(const __grid_constant__ Arguments of) {
  extern __shared__ uint4 shared[];
  Program(of, (char*)shared).run();
}
