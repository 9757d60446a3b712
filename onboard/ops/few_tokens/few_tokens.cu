// Weights of four bits (`four_bits.py`) or eight (E4M3) over one token, or at most eight: a linear layer, or
// experts of one token; and experts over blocks of at most sixteen pairs of some tokens.
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
// Of a mixture over several tokens (ROUTED), pairs of a token and an expert are sorted by expert and cut into blocks of
// TOKENS (`sort_kernels.py`); a program has neighbouring tiles of all blocks' rows, and prepares a block's inputs when
// it comes to it. The first product (ROUTED 1) reads tokens and writes the sorted rows, the second (2) reads those and
// writes pairs, weighed.
//
// Of blocks whose scales are powers of two in groups of 32 (MXFP4), weights are FOLDED with their scales: both are exact
// as bfloat16, and sums need no scale. Words and scales come through a RING of batches in the program's memory, of which
// each warp has its own.
//
// Macros beside these: BITS, TOKENS (1, 8 or 16), ROUTED, INTEGERS, GROUP and GROUPS (inputs that share a scale; groups of a
// run), SCALED_ROWS (that share scales), RING (batches, or 0: not folded),
// SCALE_TYPE, ROUTING_TYPE, SLOTS (experts whose outputs are added up, or 1), SUMMED, GATED, ORDER, ACTIVATION, EARLY, RESIDENT,
// and HAS_ZERO, HAS_WHOLE, HAS_BIAS, HAS_RESIDUAL, HAS_NORM, HAS_LIMIT, HAS_ALPHA.
constexpr int WARPS = PARTS * HEIGHT, THREADS = 32 * WARPS, EACH = PARTS / SLOTS;
constexpr int ROWS = 16 * HEIGHT, ROLES = GATED ? 2 : 1, CHANNELS = ROWS / ROLES;
constexpr bool MANY = TOKENS > 1;
constexpr int EIGHTS = MANY ? TOKENS / 8 : 1;  // of tokens, which are a product's columns
constexpr bool PAIRED = MANY && GROUPS > 1 && !FOLDED;  // operands of two neighbouring words, not of a word's halves
constexpr int PLANES = 16 / BITS, ITEMS = RUN / 8;                        // of a word's half; eights of inputs of a run
constexpr int PLANE = MANY ? 512 * EIGHTS : GROUPS == 1 ? 64 : 128;  // bytes of a plane's inputs
constexpr int STAGE = RING ? BATCH * (1024 + 128) : 0;                    // bytes of a warp's batch in its ring
constexpr int KEPT = PLANES * PLANE;                                      // bytes of a run's inputs
constexpr int COLUMNS = 8 / GROUPS < BATCH ? 8 / GROUPS : BATCH;          // runs whose groups have columns at once
constexpr int SETS = BATCH / COLUMNS;                                     // of such runs in a batch
constexpr bool APIECE = MANY && !PAIRED;                                  // four lanes have a row's scales, one each
constexpr int SCALES = APIECE ? (BATCH + 3) / 4 : PAIRED ? BATCH * GROUPS / 2 : SETS;  // that a lane has of a row, one or two

template <typename T> struct OfGroups {  // what a lane has of the groups of its rows
  T one[SCALES];              // of runs in turn
  Neighbours<T> two[SCALES];  // of some tokens: of all groups; of one: of those of its columns
};

struct Words {
  uint4 row[2][BATCH];
#if RING
  u32 scales[2][BATCH];  // four of a run
#else
  OfGroups<scale_t> scale[2];
#endif
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
  const int *table, *order;
  int tokens, outputs, inputs, groups, tiles, pairs, experts, blocks, top;
  Powers by;
  float eps, limit, alpha, offset;
};

struct Program {
  const Arguments& of;
  int lane, warp, g, t, part, height, slot, rank, programs;
  int all, each, begin, runs;  // runs of a row; of a warp's part of it; a program's: where they begin, how many
  int first, last, batches;    // a warp's: where they begin in the program's, how many there are
  char* kept;                  // inputs [slots][runs][KEPT], and a run of zeros
  float *sums, *parts;         // of groups' inputs [slots][runs][GROUPS][TOKENS]; of rows [2][PARTS][TOKENS][ROWS]
  i64 expert, ahead_expert;
  const uint4* words[2];
  i64 row[2];
  int tile, tiles_end, ahead, ahead_batch, batch, buffer;
  int block, place, rows;      // of pairs; the first one's place; how many rows of inputs there are
  float y[MANY ? 4 * EIGHTS : 2];
#if RING
  char* ring;                  // of the warp [RING][STAGE]
  const char* scales;          // what this lane brings of a row's scales, and of how many runs
  int scaled, stage, shifts[2];  // which is next in the ring; how many bits a row's scales are behind a multiple of 32
  u16 added[2];                // biases of the rows
#endif

  __device__ Program(const Arguments& of, char* shared) : of(of), kept(shared) {
    lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    part = warp % PARTS, height = warp / PARTS, slot = part % SLOTS, rank = 0;
    if (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    programs = gridDim.x / CLUSTER;
    all = (of.inputs + RUN - 1) / RUN, each = (all + EACH * CLUSTER - 1) / (EACH * CLUSTER);
    begin = min(rank * EACH * each, all), runs = min(all - begin, EACH * each);
    first = part / SLOTS * each, last = max(0, min(each, runs - first)), batches = (each + BATCH - 1) / BATCH;
    sums = (float*)(kept + (SLOTS * EACH * each + 1) * KEPT);
    parts = sums + (INTEGERS ? (SLOTS * EACH * each + 1) * GROUPS * TOKENS : 0);
    tile = ahead = blockIdx.x / CLUSTER, tiles_end = of.tiles, ahead_batch = batch = buffer = 0;
    block = place = 0, rows = SUMMED ? of.pairs : of.tokens;
#if RING
    ring = (char*)(squares() + (HAS_NORM ? (WARPS + 1) * TOKENS : 0)) + warp * RING * STAGE, stage = 0;
#endif
    for (float& v : y) v = 0.f;
  }

  __device__ __forceinline__ i64 expert_of(int pair) const {  // -1: none
    if (!of.experts) return 0;
    const i64 expert = pair < of.pairs ? of.chosen[pair] : -1;
    return expert < of.experts ? expert : -1;
  }

  // All blocks' tiles are divided evenly. Blocks without pairs are the last ones.
  __device__ __forceinline__ void take_tiles() {
    int blocks = 0;
    for (int i = threadIdx.x; i - (int)threadIdx.x < of.blocks; i += THREADS)
      blocks += __syncthreads_count(i < of.blocks && of.table[3 * i + 1] < of.table[3 * i + 2]);
    const i64 all = (i64)blocks * of.tiles;
    const int mine = blockIdx.x / CLUSTER;
    tile = ahead = all * mine / programs, tiles_end = all * (mine + 1) / programs;
    block = tile / of.tiles;
  }

  __device__ __forceinline__ void take_block() {
    const int* at = of.table + 3 * block;
    expert = at[0], place = at[1], rows = min(at[2] - place, TOKENS);
  }

  __device__ __forceinline__ i64 input_row(int row) const {
    return ROUTED == 1 ? of.order[place + row] / of.top : place + row;
  }

  // The weight's row that a row of a tile is. Rows g and g + 8 are a gate and what it multiplies.
  __device__ __forceinline__ i64 weight_row(i64 expert, int tile, int row) const {
    const i64 above = max(expert, (i64)0) * of.outputs * ROLES;
    if (!GATED) return above + min(tile * CHANNELS + row, of.outputs - 1);
    const int channel = min(tile * CHANNELS + row / 16 * 8 + row % 8, of.outputs - 1), up = row / 8 % 2;
    return above + (ORDER == 2 ? 2 * channel + up : channel + (ORDER == 1 ? 1 - up : up) * of.outputs);
  }

  __device__ __forceinline__ void go_to(int tile) {
    if (ROUTED) ahead_expert = of.table[tile / of.tiles * 3], tile %= of.tiles;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      row[h] = weight_row(ROUTED ? ahead_expert : expert, tile, height * 16 + g + 8 * h);
      words[h] = of.weight + (row[h] * all + min(begin + first, all - 1)) * 4 + t;
    }
#if RING
    const char* end = (const char*)(of.scale + (i64)of.experts * of.outputs * ROLES * of.groups);
    scales = (const char*)((u64)first_scale(t < 2 ? row[0] : row[1]) & ~(u64)3) + t % 2 * 4;
    scaled = min((i64)last, (i64)(end - scales + 3) / 4);
#endif
  }

  __device__ __forceinline__ const scale_t* first_scale(i64 row) const { return of.scale + row * of.groups + (begin + first) * GROUPS; }

  __device__ __forceinline__ void go_on() {
    if (++ahead_batch < batches) return;
    ahead_batch = 0;
    ahead = min(ahead + (ROUTED ? 1 : programs), tiles_end - 1);
    go_to(ahead);
  }

  // Of inputs [WARPS][TOKENS], and of all warps' [TOKENS], at last of all.
  __device__ __forceinline__ float* squares() const { return parts + (OWN ? 0 : 2 * PARTS * TOKENS * ROWS); }

  // Sums of squares of the program's inputs of each row, from those of its warps.
  __device__ __forceinline__ void add_up_squares() const {
    for (int row = warp; row < TOKENS; row += WARPS) {
      float one[1] = {lane < WARPS ? squares()[lane * TOKENS + row] : 0.f};
      const float sum = sums_of_lanes(one, lane);
      if (lane == 0) squares()[WARPS * TOKENS + row] = sum;
    }
  }

  __device__ __forceinline__ float inverse_of(int row) const {  // of a row's root mean square
    float sum = 0.f;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) sum += there(squares() + WARPS * TOKENS + row, c);
    return rsqrtf(sum / of.inputs + of.eps);
  }

  // Inputs that are loaded at once: of rows, and of places, which have eight inputs of a row.
  static constexpr int TOGETHER = MANY ? 8 : 1, AHEAD = MANY ? 1 : HAS_NORM ? 2 : 4;
  static constexpr int APART = BITS == 8 ? 4 : PAIRED ? 16 : 64;  // the two fours that are kept together

  // Which eight inputs a place has: of a row (of those that are added up), a run, and which of its eights.
  struct Place { int row, run, item; };
  __device__ __forceinline__ Place place_of(int i) const {
    const int places = EACH * each * ITEMS;
    return {SUMMED ? i / places : 0, (SUMMED ? i % places : i) / ITEMS, i % ITEMS};
  }
  __device__ __forceinline__ int first_input(const Place& at) const {
    return (begin + at.run) * RUN + (BITS == 8 ? at.item * 8 : at.item / 4 * (PAIRED ? 32 : 16) + at.item % 4 * 4);
  }
  __device__ __forceinline__ static bool is_shifted(int item) { return INTEGERS && !PAIRED && item / 4 % 2; }  // codes are four bits up

  // Put inputs where products find them. A norm's factor that a row's inputs share comes to their products, when all
  // squares are known.
  __device__ __forceinline__ void keep(int row, int run, int i, const Eight& v) {
    char* here = kept + (MANY ? run : row * EACH * each + run) * KEPT;
    if (BITS == 8) {  // two words, which lie side by side, of both planes
      here += (MANY ? row * 64 : 0) + i * 8;  // eights of rows lie one behind the other
      *(uint2*)here = make_uint2(__byte_perm(v.low[0], v.low[1], 0x5410), __byte_perm(v.high[0], v.high[1], 0x5410));
      *(uint2*)(here + PLANE) = make_uint2(__byte_perm(v.low[0], v.low[1], 0x7632), __byte_perm(v.high[0], v.high[1], 0x7632));
      return;
    }
    uint4* to = (uint4*)here;
    if (!MANY && GROUPS > 1) {  // a word's halves are of two groups
      to[2 * i] = make_uint4(v.low[0] & 0xFFFFu, v.low[0] >> 16, v.low[1] & 0xFFFFu, v.low[1] >> 16);
      to[2 * i + 1] = make_uint4(v.high[0] << 16, v.high[0] & 0xFFFF0000u, v.high[1] << 16, v.high[1] & 0xFFFF0000u);
      return;
    }
    to[MANY ? i / 4 * (PLANE / 16) + row * 4 + i % 4 : i] =
        PAIRED ? make_uint4(v.low[0], v.low[1], v.high[0], v.high[1])
               : make_uint4(__byte_perm(v.low[0], v.high[0], 0x5410), __byte_perm(v.low[0], v.high[0], 0x7632),
                            __byte_perm(v.low[1], v.high[1], 0x5410), __byte_perm(v.low[1], v.high[1], 0x7632));
  }

  // Add up one token's inputs of groups, of which sixteen neighbouring lanes have a run.
  __device__ __forceinline__ void add_up(const Place& at, const Eight& v) {
    constexpr bool together = GROUPS == 1;
    constexpr int lanes = GROUPS > 2 ? 32 / GROUPS : 16;
    const float back = (is_shifted(at.item) ? 16.f : 1.f) / LARGE;
    float low = sum_of(v.low) * back, high = sum_of(v.high) * back;
    if (together) low += high;
#pragma unroll
    for (int j = 1; j < lanes; j *= 2) {
      low += __shfl_xor_sync(__activemask(), low, j);
      if (!together) high += __shfl_xor_sync(__activemask(), high, j);
    }
    if (at.item % lanes) return;
    float* to = sums + (at.row * EACH * each + at.run) * GROUPS + at.item / lanes;
    to[0] = low / BACK;
    if (!together) to[GROUPS / 2] = high / BACK;
  }

  __device__ __forceinline__ void load_norm(uint2 (&by)[AHEAD][2], int start) const {
#pragma unroll
    for (int j = 0; j < AHEAD; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int k = first_input(place_of(start + j * THREADS)) + h * APART;
        by[j][h] = HAS_NORM && k < of.inputs ? *(const uint2*)(of.norm + k) : make_uint2(0, 0);
      }
  }

  __device__ __forceinline__ void load_inputs(uint2 (&in)[AHEAD][TOGETHER][2], int above, int start, int count) const {
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const int i = start + j * THREADS;
      const Place at = place_of(i);
#pragma unroll
      for (int r = 0; r < TOGETHER; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int row = above + at.row + r, k = first_input(at) + h * APART;
          const bool given = i < count && at.run < runs && k < of.inputs && row < rows;
          in[j][r][h] = given ? *(const uint2*)(of.x + (ROUTED ? input_row(row) : row) * of.inputs + k) : make_uint2(0, 0);
        }
    }
  }

  // What eight inputs are multiplied by: a norm's weight, and what makes them large.
  __device__ __forceinline__ static void enlarge(uint2 (&by)[2], int item) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 large = is_shifted(item) || (INTEGERS && PAIRED && h) ? LARGE_PAIR - FOUR_BITS : LARGE_PAIR;
      by[h] = HAS_NORM ? make_uint2(times(by[h].x, large), times(by[h].y, large)) : make_uint2(large, large);
    }
  }

  // Rows of inputs from `above` on, as products take them, of the program's runs. What a norm brings to the first was asked for before.
  __device__ __forceinline__ void prepare_rows(uint2 (&by)[AHEAD][2], int above) {
    const int count = (SUMMED ? SLOTS : 1) * EACH * each * ITEMS;
    float square[TOGETHER] = {};
    for (int start = threadIdx.x; start < count; start += THREADS * AHEAD) {
      uint2 in[AHEAD][TOGETHER][2];
      load_inputs(in, above, start, count);
      if (above || start >= THREADS) load_norm(by, start);
#pragma unroll
      for (int j = 0; j < AHEAD && start + j * THREADS < count; j++) {
        const Place at = place_of(start + j * THREADS);
        enlarge(by[j], at.item);
#pragma unroll
        for (int r = 0; r < TOGETHER; r++) {
          const Eight v = product_of(in[j][r], by[j]);
          if (HAS_NORM) square[r] += squares_of(in[j][r]);
          if (INTEGERS && !MANY) add_up(at, v);
          keep(above + at.row + r, at.run, at.item, v);
        }
      }
    }
    if (HAS_NORM) {
      const float sum = sums_of_lanes(square, lane);
      if (lane % (32 / TOGETHER) == 0) squares()[warp * TOKENS + above + lane / (32 / TOGETHER)] = sum;
    }
  }

  __device__ __forceinline__ void prepare(uint2 (&by)[AHEAD][2]) {
#pragma unroll 1
    for (int above = 0; above < (MANY ? rows : 1); above += 8) prepare_rows(by, above);
    for (int i = threadIdx.x; i < KEPT / 16; i += THREADS) ((uint4*)(kept + SLOTS * EACH * each * KEPT))[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    if (HAS_NORM) add_up_squares();
    if (INTEGERS && MANY) add_up_tokens();
    if ((INTEGERS && MANY) || (HAS_NORM && OWN)) __syncthreads();
  }

#if RING
  // Load the next batch into the ring. Lanes 4 g and 4 g + 1 bring 64 bits with a run's four scales of row g, the two
  // beside them those of row g + 8.
  __device__ __forceinline__ void load_stage() {
    char* to = ring + stage * STAGE + lane * 16;
#pragma unroll
    for (int r = 0; r < BATCH; r++) {
      const int run = ahead_batch * BATCH + r;
#pragma unroll
      for (int h = 0; h < 2; h++) copy_sixteen(to + (2 * r + h) * 512, words[h] + r * 4, run < last);
      copy_four(to + BATCH * 1024 + r * 128 - lane * 12, scales + r * 4, run < scaled);
    }
    copies_asked();
#pragma unroll
    for (int h = 0; h < 2; h++) words[h] += BATCH * 4;
    scales += BATCH * 4;
    stage = stage + 1 < RING ? stage + 1 : 0;
    go_on();
  }

  __device__ __forceinline__ void take_stage(Words& has) const {  // the oldest, which is the next to be loaded
    const char* from = ring + stage * STAGE;
    copies_done<RING - 1>();
    __syncwarp();
#pragma unroll
    for (int r = 0; r < BATCH; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        has.row[h][r] = *(const uint4*)(from + (2 * r + h) * 512 + lane * 16);
        const uint2 both = *(const uint2*)(from + BATCH * 1024 + r * 128 + (4 * g + 2 * h) * 4);
        has.scales[h][r] = __funnelshift_r(both.x, both.y, shifts[h]);
      }
    __syncwarp();
  }

  __device__ __forceinline__ void take_rows() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const i64 row = weight_row(expert, tile % of.tiles, height * 16 + g + 8 * h);
      shifts[h] = ((u64)first_scale(row) & 3) * 8;
      if (HAS_BIAS) added[h] = of.bias[row];
    }
  }

  // Weights of a plane's four words, of rows g (a) and g + 8 (b), with their scales.
  template <int ODD, bool LARGE>
  __device__ __forceinline__ void fold(u32 (&to)[8], const uint4& a, const uint4& b, u32 low, u32 high) const {
    const u32 word[8] = {a.x, b.x, a.y, b.y, a.z, b.z, a.w, b.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 scales = i % 2 ? high : low;
      to[i] = times(decode<ODD>(word[i], of.by), factors<LARGE>(scales));
      if (LARGE) to[i] = times(to[i], rest_of_factors(scales));
    }
  }

  template <int E>
  __device__ __forceinline__ void multiply_folded(float (&more)[E][4], const u32 (&a)[8], const char* inputs) {
#pragma unroll
    for (int e = 0; e < E; e++) {
      const uint4 in = *(const uint4*)(inputs + e * 512);
      multiply((float (&)[4])y[4 * e], a[0], a[1], a[2], a[3], in.x, in.y);
      multiply(more[e], a[4], a[5], a[6], a[7], in.z, in.w);
    }
  }

  // A run's products, whose weights have their scales. Those that are LARGE are two factors.
  template <int E, bool LARGE> __device__ __forceinline__ void add_run(float (&more)[E][4], const Words& has, int r) {
    const int run = batch * BATCH + r, at = run < last ? run : each;
    const char* inputs = kept + at * KEPT + lane * 16;
    uint4 a = has.row[0][r], b = has.row[1][r];
#pragma unroll
    for (int q = 0; q < 2; q++) {
      if (q) shift(a), shift(b);
      const u32 low = has.scales[0][r] >> 8 * q & 0x00FF00FFu, high = has.scales[1][r] >> 8 * q & 0x00FF00FFu;
      u32 weights[8];
      fold<0, LARGE>(weights, a, b, low, high);
      multiply_folded(more, weights, inputs + 2 * q * PLANE);
      fold<1, LARGE>(weights, a, b, low, high);
      multiply_folded(more, weights, inputs + (2 * q + 1) * PLANE);
    }
  }

  // The same as `add_tokens`.
  template <int E> __device__ __forceinline__ void add_folded(const Words& has) {
    float more[E][4] = {};
#pragma unroll
    for (int r = 0; r < BATCH; r++) {
      const bool large = (has.scales[0][r] | has.scales[1][r]) & 0x80808080u;
      if (__any_sync(~0u, large)) add_run<E, true>(more, has, r);
      else add_run<E, false>(more, has, r);
    }
#pragma unroll
    for (int i = 0; i < 4 * E; i++) y[i] += more[i / 4][i % 4];
  }

  __device__ __forceinline__ void add(const Words& has) {
    if (EIGHTS > 1 && rows > 8) add_folded<EIGHTS>(has);
    else add_folded<1>(has);
  }

  __device__ __forceinline__ void add_up_tokens() const {}  // there are no zeros
  __device__ __forceinline__ u16 bias_of(i64, int h) const { return added[h]; }

  __device__ __forceinline__ void go(int steps) {
    for (int i = 0; i < RING; i++) load_stage();
    begin_inputs();
    take_rows();
    for (int step = 0; step < steps; step++) {
      Words has;
      take_stage(has);
      compute(has);
      load_stage();
    }
    copies_done<0>();
  }
#else
  template <typename T> __device__ __forceinline__ void load_groups(OfGroups<T>& to, const T* row) const {
    const int start = (begin + first + ahead_batch * BATCH) * GROUPS;
#pragma unroll
    for (int i = 0; i < SCALES; i++) {
      const int group = start + (APIECE ? 4 * i + t : PAIRED ? 2 * i : i * COLUMNS * GROUPS + 2 * t);
      if (APIECE) to.one[i] = row[min(GROUP > RUN ? group * RUN / GROUP : group, of.groups - 1)];
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
    go_on();
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
          if (p % 2) multiply_planes<1>(some, more, a, b, in, of.by);
          else multiply_planes<0>(some, more, a, b, in, of.by);
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
    return APIECE ? has.zero[h].one[c] : has.zero[h].two[c].at(i);
#else
    return 8.f;
#endif
  }

  static constexpr int STEPS = GROUPS > 4 ? 4 : GROUPS;  // of a run of some tokens' inputs

  // Products of a step's planes, of words of rows g (a) and g + 8 (b), with each eight of tokens.
  template <int E>
  __device__ __forceinline__ void multiply_step(float (&some)[E][4], float (&more)[E][4], uint4& a, uint4& b, const char* inputs, int q) const {
#pragma unroll
    for (int p = q * (PLANES / STEPS); p < (q + 1) * (PLANES / STEPS); p++) {
      if (!PAIRED && p == 2) shift(a), shift(b);
#pragma unroll
      for (int e = 0; e < E; e++) {
        const uint4 in = *(const uint4*)(inputs + p * PLANE + e * 512);
        if (PAIRED) {
          const u32 byte = p | (p + 4) << 8;  // byte p of two words, a half each
          const u32 a0 = __byte_perm(a.x, a.y, byte), a1 = __byte_perm(a.z, a.w, byte);
          const u32 b0 = __byte_perm(b.x, b.y, byte), b1 = __byte_perm(b.z, b.w, byte);
          multiply(some[e], decode<0>(a0, of.by), decode<0>(b0, of.by), decode<0>(a1, of.by), decode<0>(b1, of.by), in.x, in.y);
          multiply(GROUPS == 8 ? more[e] : some[e], decode<1>(a0, of.by), decode<1>(b0, of.by), decode<1>(a1, of.by), decode<1>(b1, of.by), in.z, in.w);
        } else if (p % 2) multiply_planes<1>(some[e], more[e], a, b, in, of.by);
        else multiply_planes<0>(some[e], more[e], a, b, in, of.by);
      }
    }
  }

  // Sums of groups of some tokens' inputs: their products with codes that are one.
  __device__ __forceinline__ void add_up_tokens() const {
    for (int run = warp; run <= EACH * each; run += WARPS) {  // and of none, which are zero
      uint4 a = make_uint4(0x11111111, 0x11111111, 0x11111111, 0x11111111), b = a;
#pragma unroll
      for (int q = 0; q < STEPS; q++) {
        float some[EIGHTS][4] = {}, more[EIGHTS][4] = {};
        multiply_step(some, more, a, b, kept + run * KEPT + lane * 16, q);
        if (g) continue;
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
          float2* to = (float2*)(sums + run * GROUPS * TOKENS + 8 * e + 2 * t);
          if (GROUPS == 8) to[2 * q * TOKENS / 2] = make_float2(some[e][0], some[e][1]), to[(2 * q + 1) * TOKENS / 2] = make_float2(more[e][0], more[e][1]);
          else to[q * TOKENS / 2] = make_float2(some[e][0] + more[e][0], some[e][1] + more[e][1]);
        }
      }
    }
  }

  // Products of some tokens, of E eights. What is behind a warp's last run has no inputs: without a branch, products
  // of neighbouring runs go side by side.
  template <int E> __device__ __forceinline__ void add_tokens(const Words& has) {
#pragma unroll
    for (int r = 0; r < BATCH; r++) {
      const int run = batch * BATCH + r, at = run < last ? first + run : SLOTS * EACH * each;
      uint4 a = has.row[0][r], b = has.row[1][r];
#pragma unroll
      for (int q = 0; q < STEPS; q++) {
        float some[E][4] = {}, more[E][4] = {};
        multiply_step(some, more, a, b, kept + at * KEPT + lane * 16, q);
        if (GROUPS == 8) {  // a plane is a group
          scale_tokens(has, some, r * GROUPS + 2 * q, at * GROUPS + 2 * q);
          scale_tokens(has, more, r * GROUPS + 2 * q + 1, at * GROUPS + 2 * q + 1);
        } else {
#pragma unroll
          for (int i = 0; i < (PAIRED ? 0 : 4 * E); i++) some[i / 4][i % 4] += more[i / 4][i % 4];
          scale_tokens(has, some, r * GROUPS + q, at * GROUPS + q);
        }
      }
    }
  }

  // Each group's sums are scaled; where lanes have a scale apiece, by what one of four has.
  template <int E>
  __device__ __forceinline__ void scale_tokens(const Words& has, const float (&some)[E][4], int at, int group) {
    const int from = (lane & ~3) | at % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float own = number(APIECE ? has.scale[h].one[at / 4] : has.scale[h].two[at / 2].at(at % 2));
      const float own_zero = zero_of(has, h, APIECE ? at / 4 : at / 2, at % 2);
      const float scale = APIECE ? __shfl_sync(~0u, own, from) : own;
      const float zero = APIECE && HAS_ZERO ? __shfl_sync(~0u, own_zero, from) : own_zero;
#pragma unroll
      for (int e = 0; e < E; e++) {
        float2 sum = make_float2(0.f, 0.f);
        if (INTEGERS) sum = *(const float2*)(sums + group * TOKENS + 8 * e + 2 * t);
        y[MANY ? 4 * e + 2 * h : h] += (some[e][2 * h] - zero * sum.x) * scale;
        y[MANY ? 4 * e + 2 * h + 1 : h] += (some[e][2 * h + 1] - zero * sum.y) * scale;
      }
    }
  }

  __device__ __forceinline__ void add(const Words& has) {
    if (EIGHTS > 1 && rows > 8) add_tokens<EIGHTS>(has);
    else if (MANY) add_tokens<1>(has);
    else add_groups(has);
  }

  __device__ __forceinline__ void take_rows() {}
  __device__ __forceinline__ u16 bias_of(i64 row, int) const { return of.bias[row]; }

  __device__ __forceinline__ void go(int steps) {
    Words even, odd;
    load(even);
    begin_inputs();
    for (int step = 0; step < steps; step += 2) {
      load(odd);
      compute(even);
      if (step + 1 == steps) break;
      load(even);
      compute(odd);
    }
  }
#endif

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
    return v;
  }

  // What a row of an expert brings to a token, of the sum of its products.
  __device__ __forceinline__ float brought(float sum, int token, int row, i64 expert, int h = 0) const {
    float v = sum * BACK;
    if (HAS_NORM) v *= inverse_of(token);
    const i64 at = weight_row(expert, ROUTED ? tile % of.tiles : tile, row);
    if (HAS_WHOLE) v *= of.whole[at];
    if (HAS_BIAS) v += low_of(bias_of(at, h));
    return v;
  }

  __device__ __forceinline__ float activated(float v, float up) const {
    if (HAS_LIMIT) v = fminf(v, of.limit);
    v = HAS_ALPHA ? v / (1.f + __expf(-of.alpha * v)) : activate<ACTIVATION>(v);
    if (!GATED) return v;
    if (HAS_LIMIT) up = fminf(fmaxf(up, -of.limit), of.limit);
    return v * (up + of.offset);
  }

  __device__ __forceinline__ float result(int token, int channel) const {
    const int row = GATED ? channel / 8 * 16 + channel % 8 : channel;
    float v = 0.f;
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      const i64 expert = SUMMED ? expert_of(s) : this->expert;
      if (SUMMED && expert < 0) continue;
      v += brought(total(token, row, s), token, row, expert) * (SUMMED ? weight_of(of.routing[s]) : 1.f);
    }
    return activated(v, GATED ? brought(total(token, row + 8, 0), token, row + 8, expert) : 0.f);
  }

  __device__ __forceinline__ void store(int token, int channel, float v) const {  // of a tile's channels
    channel += (ROUTED ? tile % of.tiles : tile) * CHANNELS;
    if (channel >= of.outputs || token >= (SUMMED ? 1 : rows)) return;
    const int row = ROUTED == 2 ? of.order[place + token] : place + token + blockIdx.y;
    if (ROUTED == 2) v *= weight_of(of.routing[row]);
    const i64 at = (i64)row * of.outputs + channel;
    if (HAS_RESIDUAL) v += low_of(of.residual[at]);
    of.out[at] = (u16)pair(v, 0.f);
  }

  // Add up the parts of a tile's rows, and store what becomes of them.
  __device__ __forceinline__ void add_up_parts() {
    float* to = parts + (buffer * PARTS + part) * TOKENS * ROWS + height * 16 + g;
#pragma unroll
    for (int i = 0; i < (MANY ? 4 * EIGHTS : 2); i++) {
      if (MANY) to[(i / 4 * 8 + 2 * t + i % 2) * ROWS + i / 2 % 2 * 8] = y[i];
      else {
        y[i] += __shfl_xor_sync(~0u, y[i], 1);
        y[i] += __shfl_xor_sync(~0u, y[i], 2);
        if (t == 0) to[8 * i] = y[i];
      }
    }
    meet();
    for (int i = threadIdx.x * CLUSTER + rank; i < CHANNELS * TOKENS; i += THREADS * CLUSTER)
      if (i / CHANNELS < (SUMMED ? 1 : rows)) store(i / CHANNELS, i % CHANNELS, result(i / CHANNELS, i % CHANNELS));
    buffer ^= 1;
  }

  // The same of warps that have all of their rows' inputs.
  __device__ __forceinline__ void store_own() const {
#pragma unroll
    for (int i = 0; i < 2 * EIGHTS; i++) {
      const int token = i / 2 * 8 + 2 * t + i % 2, row = height * 16 + g;
      if (token >= rows) continue;
      const float v = brought(y[i / 2 * 4 + i % 2], token, row, expert), w = brought(y[i / 2 * 4 + 2 + i % 2], token, row + 8, expert, 1);
      store(token, GATED ? height * 8 + g : row, activated(v, w));
      if (!GATED) store(token, row + 8, activated(w, 0.f));
    }
  }

  static constexpr bool OWN = MANY && PARTS == 1 && CLUSTER == 1;

  __device__ __forceinline__ void finish() {
    if (OWN) store_own();
    else add_up_parts();
    for (float& v : y) v = 0.f;
    tile += ROUTED ? 1 : programs;
    if (ROUTED && tile < tiles_end && tile / of.tiles != block) {
      block = tile / of.tiles;
      if (OWN) __syncthreads();  // all have done with the inputs
      take_block();
      uint2 by[AHEAD][2];
      prepare(by);
    }
    take_rows();
  }

  __device__ __forceinline__ void compute(const Words& has) {
    add(has);
    if (++batch < batches) return;
    batch = 0;
    finish();
  }

  __device__ __forceinline__ void begin_inputs() {
    uint2 by[AHEAD][2];
    load_norm(by, threadIdx.x);
    if (EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    prepare(by);
  }

  __device__ __forceinline__ void run() {
    if (!EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");
    if (ROUTED) take_tiles();
    if (ROUTED && tile == tiles_end) {
      if (EARLY) asm volatile("griddepcontrol.wait;" ::: "memory");  // what comes behind waits for what was before
      return;
    }
    if (ROUTED) take_block();
    else expert = expert_of(SUMMED ? slot : blockIdx.y);
    const int steps = (ROUTED ? tiles_end - tile : (of.tiles - tile + programs - 1) / programs) * batches;
    go_to(tile);
    go(steps);
    if (CLUSTER > 1) meet();  // others read what this program has
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) few_tokens(const __grid_constant__ Arguments of) {
  extern __shared__ uint4 shared[];
  Program(of, (char*)shared).run();
}
