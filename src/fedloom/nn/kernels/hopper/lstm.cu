// All time steps of an LSTM layer with weights per client, forward and backward. For Hopper GPUs (bulk copies, mbarriers).
//
// A thread block has some samples of one client, and its threads keep all weights in registers, so a step reads only what
// the previous step left in shared memory, and inputs that were prefetched some steps ago. Products run on tensor cores in
// float16: a number is split into two float16, the second one 2048 times the remainder of the first, and a product is three
// products; what is left out is below the last bit of a float32. Weights and initial states beyond 65504 give NaN. Gradients
// are scaled by a power of two, so that they fit: by that of the previous step or, where that does not suffice, by their own.
//
// Rows of a product are units and its columns are samples. A thread has the sums of a unit for two samples of a tile of
// eight in its registers, and computes these cells; `g` and `t` are its group and its index in the group, as the PTX manual
// numbers them for "mma.m16n8k16". Up to four remaining samples share a tile: high parts in four columns, low parts in the
// other four.
//
// H: units, a multiple of 4. ROWS: samples of a thread block, 12 at most. KEEP: store the gates; those of a unit are adjacent.
// LOW_APART: low parts of the weights are in shared memory (forward), because a thread has too few registers. OVER: the last
// units (0 or 4) that have no warps of their own (backward); two warps compute their cells, and all warps a part of their sums.

#define FULL ((ROWS + 3) / 8)                  // tiles of eight samples
#define SHARED (ROWS > 8 * FULL)               // is there one of up to four?
#define TILES (FULL + SHARED)
#define CELLS (2 * FULL + SHARED)              // of a thread, and tiles of halves
#define PLACES (8 * FULL + 4 * SHARED)         // for samples, of which some may be empty
#define EIGHTS ((H + 7) / 8)                   // of units
#define PAIRS ((H - OVER + 15) / 16)           // pairs of warps, backward
// Padded stride between samples of k floats, so that threads that read together hit different banks.
#define APART(k) ((k) + (24 - (k) % 16) % 16)

constexpr float LOW = 1.0f / 2048;

struct alignas(16) Words {
    unsigned at[4];
};

struct alignas(16) Numbers {
    float at[4];
};

struct alignas(8) Two {
    unsigned at[2];
};

struct alignas(8) Both {
    float at[2];
};

#ifndef EMULATED
// to (16 x 8) += a (16 x 16) b (16 x 8)
__device__ __forceinline__ void mma(float (&to)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same product with eight terms instead of sixteen.
__device__ __forceinline__ void mma(float (&to)[4], const unsigned (&a)[2], unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

// Packs two numbers as float16, the first one in the lower bits; and unpacks one of them.
__device__ __forceinline__ unsigned halves(float first, float second) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}

__device__ __forceinline__ float half_of(unsigned both, int which) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)(which ? both >> 16 : both)));
    return x;
}

// 2^x and 1 / x, to a unit or two in the last place
__device__ __forceinline__ float two_to(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float inverse(float x) {
    float y;
    asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

typedef unsigned long long Signal;

__device__ __forceinline__ unsigned address(const void* of) { return (unsigned)__cvta_generic_to_shared(of); }

// Initialises an mbarrier on which so many rows arrive.
__device__ __forceinline__ void prepare(Signal* signal, int rows) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1; fence.mbarrier_init.release.cluster;" ::"r"(address(signal)), "r"(rows) : "memory");
}

// Announces the bytes of a row that a bulk copy will bring.
__device__ __forceinline__ void expect(Signal* signal, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(signal)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void fetch(float* to, const float* from, int count, Signal* signal) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(4 * count), "r"(address(signal))
                 : "memory");
}

// Waits for the bytes that were announced for the `turn`-th time.
__device__ __forceinline__ void fetched(Signal* signal, int turn) {
    asm volatile(
        "{ .reg .pred there;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
        "@!there bra again; }" ::"r"(address(signal)), "r"(turn & 1) : "memory");
}

// Makes writes to shared memory visible to bulk copies that start after the next barrier.
__device__ __forceinline__ void ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void store(float* to, const float* from, int count) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)), "r"(address(from)),
                 "r"(4 * count)
                 : "memory");
}

// Waits until the bulk copies of this thread have read their shared memory.
__device__ __forceinline__ void stored() {
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Barrier of two neighbouring warps.
__device__ __forceinline__ void meet(int pair) { asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory"); }

// Named barrier of all warps: some wait, the others only arrive.
__device__ __forceinline__ void gather(bool wait) {
    if (wait) asm volatile("bar.sync 15, %0;" ::"r"(blockDim.x) : "memory");
    else asm volatile("bar.arrive 15, %0;" ::"r"(blockDim.x) : "memory");
}

extern __shared__ Words shared_memory[];
#endif

__device__ __forceinline__ float sigmoid(float x) { return inverse(1 + two_to(-1.44269504f * x)); }

// Exact to a few units in the last place, also for small x.
__device__ __forceinline__ float tangent(float x) {
    const float y = x * x, far = 2 * inverse(1 + two_to(-2.88539008f * x)) - 1;
    const float near = x * (1 + y * (-1.0f / 3 + y * (2.0f / 15 + y * (-17.0f / 315 + y * (62.0f / 2835)))));
    return y < 0.0625f ? near : far;
}

// Splits two numbers into high and low float16 parts.
struct Split {
    unsigned high, low;
    __device__ __forceinline__ Split(float a, float b) : high(halves(a, b)) {
        low = halves((a - half_of(high, 0)) / LOW, (b - half_of(high, 1)) / LOW);
    }
};

// The operand of a product in shared memory: terms in groups of eight, as a tensor core loads them. Positions are permuted
// within and between groups of threads, so that threads which write at the same time hit different banks (a swizzle).
template <int FOURS>
struct States {
    Words at[CELLS][FOURS][32];

    __device__ __forceinline__ static int place(int g, int t) { return (g ^ g / 2 % 2) * 4 + (t ^ g / 2); }

    __device__ __forceinline__ const Words& mine(int tile, int four) const {
        const int lane = threadIdx.x % 32;
        return at[tile][four][place(lane / 4, lane % 4)];
    }

    // Address of the words of thread t for a sample, of the high or of the low parts.
    __device__ __forceinline__ unsigned* words(int sample, int second, int four, int t) {
        const int tile = sample / 8, k = sample % 8;
        if (tile < FULL) return at[2 * tile + second][four][place(k % 4 * 2 + k / 4, t)].at;
        return at[2 * FULL][four][place(k % 2 * 2 + k / 2 + 4 * second, t)].at;
    }

    __device__ void clear() {
        for (int k = threadIdx.x; k < CELLS * FOURS * 32; k += blockDim.x) (&at[0][0][0])[k] = Words{};
    }
};

// Index of the sample of a thread's cell.
__device__ __forceinline__ int sample_of(int cell) { return cell / 2 * 8 + threadIdx.x % 4 + cell % 2 * 4; }

// Adds the sums of the high and the low column of a shared tile for this thread's cell; threads exchange them by shuffles.
__device__ __forceinline__ float exchanged(float first, float second) {
    const bool low = threadIdx.x & 2;
    const float scale = low ? LOW : 1;
    return scale * (low ? second : first) + __shfl_xor_sync(0xffffffff, scale * (low ? first : second), 2);
}

// The sums of high and of mixed products of a tile of 16 x 8, which are added at the end.
struct Sums {
    float main[4], rest[4];
    __device__ __forceinline__ float of(int i) const { return main[i] + LOW * rest[i]; }
};

// A thread's part of the weights: WIDTH tiles of 16 rows; low parts may be in shared memory.
template <int COUNT, int WIDTH, bool ELSEWHERE>
struct Weights {
    Words high[COUNT][WIDTH], own[ELSEWHERE ? 1 : COUNT][WIDTH];
    Words* others;

    __device__ __forceinline__ const Words& low(int k, int tile) const {
        return ELSEWHERE ? others[(k * WIDTH + tile) * blockDim.x] : own[k][tile];
    }

    __device__ __forceinline__ void put(int k, int tile, int i, const Split& some) {
        high[k][tile].at[i] = some.high;
        const_cast<Words&>(low(k, tile)).at[i] = some.low;
    }

    // sums += the product with the groups of terms 2 j and 2 j + 1 in `first` and, if given, their low parts in `second`; or
    // with group 2 j only
    __device__ __forceinline__ void multiply(
        Sums& sums, int k, int tile, const Words& first, const Words& second, int j, bool two, bool both
    ) const {
        const Words rest = low(k, tile);
        one(sums.main, high[k][tile], first, j, both);
        one(sums.rest, rest, first, j, both);
        if (two) one(sums.rest, high[k][tile], second, j, both);
    }

    __device__ __forceinline__ static void one(float (&sums)[4], const Words& a, const Words& b, int j, bool both) {
        if (both) mma(sums, a.at, {b.at[2 * j], b.at[2 * j + 1]});
        else mma(sums, {a.at[0], a.at[1]}, b.at[2 * j]);
    }
};

// Number of samples of a thread block, of so many that are left.
__device__ __forceinline__ int rows_of(long long left) { return left < ROWS ? (int)left : ROWS; }

// -- forward ----------------------------------------------------------------------------------------------------------

#define FOURS ((EIGHTS + 3) / 4)

struct ForwardShared {
    States<FOURS> states;
    Numbers bias[8 * EIGHTS];
    Words weights[LOW_APART ? (EIGHTS + 1) / 2 * 2 * 32 * EIGHTS : 1];
    float inputs[3][PLACES][APART(4 * H)];
    Signal signals[3];
    const float* from[PLACES];  // the next row of a sample's inputs
};

// The first of the two units whose states thread t has in a group of eight terms.
__device__ __forceinline__ int term_of(int eight, int t) {
    return eight / 4 < EIGHTS / 4 ? eight / 4 * 32 + 8 * t + eight % 4 * 2 : 8 * eight + 2 * t;
}

// (i, f, g, o) = z[t] + bias + w h; c' = s(f) c + s(i) tanh(g); h' = s(o) tanh(c')
// A warp has eight units and prefetches rows of inputs. Cells of one tile of samples overlap with products of the other.
extern "C" __global__ void __launch_bounds__(32 * EIGHTS, 1) forward(
    const float* z, const float* h0, const float* c0, const float* w, const float* bias, float* hs, float* cs, float* gates,
    long long steps, long long samples, long long z_n, long long z_t, long long z_b, long long w_n, long long bias_n
) {
    ForwardShared& here = *(ForwardShared*)shared_memory;
    const int me = threadIdx.x, lane = me % 32, t = me % 4, warp = me / 32, unit = me / 4, g = unit % 8;
    const long long client = blockIdx.x, first = blockIdx.y * ROWS;
    const int rows = rows_of(samples - first);
    const bool inside = H % 8 == 0 || unit < H;

    auto ask = [&](int buffer) {
        if (lane == 0)
#pragma unroll 1
            for (int row = warp; row < rows; row += EIGHTS) {
                const float* from = here.from[row];
                expect(&here.signals[buffer], 16 * H);
                fetch(here.inputs[buffer][row], from, 4 * H, &here.signals[buffer]);
                here.from[row] = from + z_t;
            }
    };
    auto put = [&](int sample, float h) {
        const Split split(h, 0);
        const bool whole = warp / 4 < EIGHTS / 4;
#pragma unroll
        for (int second = 0; second < 2; second++) {
            unsigned* words = here.states.words(sample, second, warp / 4, whole ? warp % 4 : g / 2);
            ((unsigned short*)words)[whole ? g : warp % 4 * 2 + g % 2] = (unsigned short)(second ? split.low : split.high);
        }
    };
    if (me < 3) prepare(&here.signals[me], rows);
    if (me < rows) here.from[me] = z + client * z_n + (first + me) * z_b;
    here.states.clear();
    for (int k = me; k < 4 * H; k += 32 * EIGHTS) here.bias[k % H].at[k / H] = bias[client * bias_n + k];
    Weights<(EIGHTS + 1) / 2, 2, LOW_APART> weights;
    weights.others = &here.weights[me];
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++)
#pragma unroll
        for (int gate = 0; gate < 4; gate++) {
            const int k = term_of(eight, t);
            const bool there = unit < H && k < H;
            const float* from = w + client * w_n + (gate * H + unit) * H + k;
            weights.put(eight / 2, gate / 2, eight % 2 * 2 + gate % 2, Split(there ? from[0] : 0, there ? from[1] : 0));
        }
    __syncthreads();
    float cells[CELLS];
#pragma unroll
    for (int i = 0; i < CELLS; i++) {
        const int sample = sample_of(i);
        cells[i] = 0;
        if (unit >= H || sample >= rows) continue;
        const long long from = (client * samples + first + sample) * H + unit;
        put(sample, h0[from]);
        cells[i] = c0[from];
    }
    ask(0);
    if (steps > 1) ask(1);
    __syncthreads();

    // The sums of tile n of samples, from the layout of tensor cores to that of cells.
    Sums found[2];
    float sums[CELLS][4];
    auto multiply = [&](int n) {
        found[0] = found[1] = {};
#pragma unroll
        for (int four = 0; four < FOURS; four++) {
            const Words one = here.states.mine(2 * n, four), two = here.states.mine(n < FULL ? 2 * n + 1 : 2 * n, four);
#pragma unroll
            for (int j = 0; j < 2 && 4 * four + 2 * j < EIGHTS; j++)
#pragma unroll
                for (int m = 0; m < 2; m++)
                    weights.multiply(found[m], 2 * four + j, m, one, two, j, n < FULL, 4 * four + 2 * j + 1 < EIGHTS);
        }
    };
    auto add_up = [&](int n) {
#pragma unroll
        for (int gate = 0; gate < 4; gate++) {
            const float one = found[gate / 2].of(gate % 2 * 2), two = found[gate / 2].of(gate % 2 * 2 + 1);
            sums[2 * n][gate] = n < FULL ? one : exchanged(one, two);
            if (n < FULL) sums[2 * n + 1][gate] = two;
        }
    };
    multiply(0);
    add_up(0);
    __syncthreads();

    const long long at = (client * steps * samples + first + t) * H + unit;
    hs += at;
    cs += at;
    gates += 4 * at;
    // now: buffer with this step's inputs; later: buffer to prefetch into; turn: how often the buffers were reused
    // (mbarrier phase)
    int now = 0, later = 2, turn = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            const int next = (n + 1) % TILES;
            if (TILES > 1) multiply(next);
            if (n == 0) fetched(&here.signals[now], turn);
            if (n == TILES - 1 && step + 2 < steps) ask(later);
            const Numbers added = here.bias[unit];
#pragma unroll
            for (int i = 2 * n; i < 2 * n + 2 && i < CELLS; i++) {
                const int sample = sample_of(i);
                float x[4];
#pragma unroll
                for (int gate = 0; gate < 4; gate++)
                    x[gate] = sums[i][gate] + (here.inputs[now][sample][gate * H + unit] + added.at[gate]);
                const float in = sigmoid(x[0]), f = sigmoid(x[1]), what = tangent(x[2]), o = sigmoid(x[3]);
                const float c = f * cells[i] + in * what, h = o * tangent(c);
                cells[i] = c;
                if (inside) put(sample, h);
                if (inside && sample < rows) {
                    const int to = (sample - t) * H;
                    hs[to] = h;
                    cs[to] = c;
                    if (KEEP) *(Numbers*)(gates + 4 * to) = {in, f, what, o};
                }
            }
            if (TILES > 1) add_up(next);
            __syncthreads();
        }
        if (TILES == 1) {
            multiply(0);
            add_up(0);
            __syncthreads();
        }
        hs += samples * H;
        cs += samples * H;
        gates += 4 * samples * H;
        later = now;
        if (++now == 3) now = 0, turn++;
    }
}

// -- backward ---------------------------------------------------------------------------------------------------------

#define LESS (EIGHTS / 2)                                      // eights of units whose gradients the first of two warps multiplies
#define MORE (EIGHTS - LESS)                                   // and the second
#define SIXTEENS (2 * MORE - (H % 8 && MORE > LESS ? 1 : 0))  // of these gradients

struct BackwardShared {
    States<EIGHTS> slopes[2];
    Words over[OVER ? EIGHTS : 1][32];
    float gates[2][PLACES][APART(4 * H)], cells[2][PLACES][APART(H)], dh[2][PLACES][APART(H)], dc[2][PLACES][APART(H)];
    float dz[2][PLACES][APART(4 * H)];
    Signal signals[2];
    Both over_parts[OVER ? TILES : 1][2 * PAIRS][32];
    float parts[2 * PAIRS][CELLS][32];
    unsigned most[3];  // largest absolute gradient of a step (float bits)
    const float *dh_from[PLACES], *dc_from[PLACES];
    long long from[PLACES], to[PLACES];
};

// From the last step to the first, and once more for the gradient to the initial state. `db` is the sum of `dz` over steps
// and over the samples of a thread block.
// Two warps have sixteen units. Each sums half of the terms of all of them, then computes the cells of eight units, and copies
// rows of inputs and results.
extern "C" __global__ void __launch_bounds__(64 * PAIRS, 1) backward(
    const float* dhs, const float* dcs, const float* gates, const float* c0, const float* cs, const float* w,
    float* dz, float* dh0, float* dc0, float* db, long long steps, long long samples,
    long long dh_n, long long dh_t, long long dh_b, long long dc_n, long long dc_t, long long dc_b, long long w_n
) {
    BackwardShared& here = *(BackwardShared*)shared_memory;
    const int me = threadIdx.x, lane = me % 32, t = me % 4, warp = me / 32, pair = warp / 2, g = lane / 4, unit = 8 * warp + g;
    const bool second = warp % 2;
    const long long client = blockIdx.x, first = blockIdx.y * ROWS;
    const int rows = rows_of(samples - first);
    const int tile = warp, over_unit = 16 * PAIRS + g % 4, over_sample = tile < FULL ? 8 * tile + t + g / 4 * 4 : 8 * FULL + t;
    const bool over_cells = OVER && (tile < FULL || tile < TILES && g < 4);

    // Index of a row: of a step, or of the initial state.
    auto row_of = [&](long long step, int sample) { return (client * steps + step) * samples + first + sample; };
    auto start_of = [&](int sample) { return client * samples + first + sample; };
    auto ask = [&](int turn) {
        const int buffer = turn & 1;
        Signal* signal = &here.signals[buffer];
        if (lane == 0)
#pragma unroll 1
            for (int row = warp; row < rows; row += 2 * PAIRS) {
                const float *dh = here.dh_from[row], *dc = here.dc_from[row];
                const long long at = here.from[row], before = at - samples * H;
                here.dh_from[row] = dh - dh_t;
                here.dc_from[row] = dc - dc_t;
                here.from[row] = before;
                expect(signal, 28 * H);
                fetch(here.gates[buffer][row], gates + 4 * at, 4 * H, signal);
                fetch(here.cells[buffer][row], turn + 1 < steps ? cs + before : c0 + H * start_of(row), H, signal);
                fetch(here.dh[buffer][row], dh, H, signal);
                fetch(here.dc[buffer][row], dc, H, signal);
            }
    };
    auto weights_of = [&](int eight, int j, int gate, int to) {
        const int k = 8 * eight + 4 * j + t;
        const bool there = eight < (second ? EIGHTS : LESS) && k < H && to < H;
        const float* from = w + client * w_n + (gate * H + k) * H + to;
        return Split(there ? from[0] : 0, there ? from[H * H] : 0);
    };
    struct Cell {
        float after = 0, late = 0;  // what the step left; gradient to it from later steps
    };
    auto last = [&](int sample, int unit) {
        Cell cell;
        if (unit < H && sample < rows) cell.after = cs[H * row_of(steps - 1, sample) + unit];
        return cell;
    };
    Cell cells[CELLS], over_cell;
    float totals[4] = {}, over_totals[4] = {};  // of gradients to gates
#pragma unroll
    for (int i = 0; i < CELLS; i++) cells[i] = last(sample_of(i), unit);
    if (over_cells) over_cell = last(over_sample, over_unit);
    if (me == 0) {
        prepare(&here.signals[0], rows);
        prepare(&here.signals[1], rows);
    }
    here.slopes[0].clear();
    here.slopes[1].clear();
    if (me < 3) here.most[me] = 0;
    if (me < rows) {
        here.dh_from[me] = dhs + client * dh_n + (steps - 1) * dh_t + (first + me) * dh_b;
        here.dc_from[me] = dcs + client * dc_n + (steps - 1) * dc_t + (first + me) * dc_b;
        here.from[me] = here.to[me] = H * row_of(steps - 1, me);
    }
    const int begin = second ? LESS : 0;
    Weights<SIXTEENS, 1, false> weights;
#pragma unroll
    for (int k = 0; k < SIXTEENS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) weights.put(k, 0, i, weights_of(begin + k / 2, k % 2, i / 2 * 2, 16 * pair + i % 2 * 8 + g));
    if (OVER && pair == 0)  // first halves with the first four groups of threads, second ones with the others
        for (int eight = begin; eight < (second ? EIGHTS : LESS); eight++)
            for (int i = 0; i < 4; i++) {
                const Split some = weights_of(eight, i / 2, i % 2 * 2, over_unit);
                here.over[eight][lane].at[i] = g < 4 ? some.high : some.low;
            }
    __syncthreads();
    ask(0);
    if (steps > 1) ask(1);
    float scale = 1, unscale = 1;

#pragma unroll 1
    for (int turn = 0; turn <= steps; turn++) {
        const int now = turn & 1;
        const auto& slopes = here.slopes[now];
        float sums[2][CELLS];  // of two units
        {
            Sums found[TILES] = {};
#pragma unroll
            for (int k = 0; k < MORE; k++) {
                if (k >= LESS && !second) continue;
                Words b[CELLS];
#pragma unroll
                for (int i = 0; i < CELLS; i++) b[i] = slopes.mine(i, begin + k);
#pragma unroll
                for (int j = 0; j < 2 && 2 * k + j < SIXTEENS; j++)
#pragma unroll
                    for (int n = 0; n < TILES; n++)
                        weights.multiply(found[n], 2 * k + j, 0, b[2 * n], b[n < FULL ? 2 * n + 1 : 2 * n], j, n < FULL, true);
            }
#pragma unroll
            for (int row = 0; row < 2; row++)
#pragma unroll
                for (int i = 0; i < CELLS; i++) {
                    const Sums& some = found[i / 2];
                    const float sum = i < 2 * FULL ? some.of(2 * row + i % 2) : exchanged(some.of(2 * row), some.of(2 * row + 1));
                    sums[row][i] = unscale * sum;
                }
        }
        if (OVER) {
            Sums found[TILES] = {};
#pragma unroll 1
            for (int eight = begin + pair; eight < (second ? EIGHTS : LESS); eight += PAIRS) {
                const Words a = here.over[eight][lane];
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    const Words high = slopes.mine(2 * n, eight), low = slopes.mine(n < FULL ? 2 * n + 1 : 2 * n, eight);
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        mma(found[n].main, {a.at[2 * j], 0, a.at[2 * j + 1], 0}, {high.at[2 * j], high.at[2 * j + 1]});
                        if (n < FULL) mma(found[n].rest, {a.at[2 * j], 0, a.at[2 * j + 1], 0}, {low.at[2 * j], low.at[2 * j + 1]});
                    }
                }
            }
            const float factor = g < 4 ? unscale : LOW * unscale;
#pragma unroll
            for (int n = 0; n < TILES; n++)
                here.over_parts[n][warp][lane] = {factor * found[n].of(0), factor * found[n].of(1)};
        }
#pragma unroll
        for (int i = 0; i < CELLS; i++) here.parts[warp ^ 1][i][lane] = second ? sums[0][i] : sums[1][i];
        meet(pair);
        if (turn < steps) fetched(&here.signals[now], turn / 2);

        unsigned most = 0;
        auto put = [&](const float (&to)[4], int sample, int unit) {
            const Split a(scale * to[0], scale * to[1]), b(scale * to[2], scale * to[3]);
#pragma unroll
            for (int low = 0; low < 2; low++) {
                unsigned* words = here.slopes[!now].words(sample, low, unit / 8, unit % 4);
                ((Two*)words)[unit % 8 / 4] = low ? Two{a.low, b.low} : Two{a.high, b.high};
            }
        };
        auto compute = [&](float (&totals)[4], float carried, int sample, int unit, Cell& cell) {
            const bool there = unit < H && sample < rows;
            if (turn == steps) {
                if (!there) return;
                dh0[H * start_of(sample) + unit] = carried;
                dc0[H * start_of(sample) + unit] = cell.late;
                return;
            }
            const Numbers given = *(const Numbers*)&here.gates[now][sample][4 * unit];
            const float i = given.at[0], f = given.at[1], g = given.at[2], o = given.at[3], before = here.cells[now][sample][unit];
            const float dh = here.dh[now][sample][unit] + carried, out = tangent(cell.after);
            const float dc = here.dc[now][sample][unit] + cell.late + dh * o * (1 - out * out);
            float to[4] = {dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g), dh * out * o * (1 - o)};
            cell.late = dc * f;
            cell.after = before;
#pragma unroll
            for (int gate = 0; gate < 4; gate++) {
                to[gate] = there ? to[gate] : 0;
                if (unit < H) here.dz[now][sample][gate * H + unit] = to[gate];
                totals[gate] += to[gate];
                const unsigned bits = __float_as_uint(to[gate]) & 0x7fffffff;
                most = bits > most ? bits : most;
            }
            if (unit < H) put(to, sample, unit);
        };
        auto again = [&](int sample, int unit) {
            float to[4];
#pragma unroll
            for (int gate = 0; gate < 4; gate++) to[gate] = here.dz[now][sample][gate * H + unit];
            put(to, sample, unit);
        };
#pragma unroll
        for (int i = 0; i < CELLS; i++)
            compute(totals, (second ? sums[1][i] : sums[0][i]) + here.parts[warp][i][lane], sample_of(i), unit, cells[i]);
        if (OVER) {
            gather(tile < TILES);
            if (tile < TILES) {
                float both[2] = {};
#pragma unroll
                for (int part = 0; part < 2 * PAIRS; part++) {
                    const Both some = here.over_parts[tile][part][lane];
                    both[0] += some.at[0];
                    both[1] += some.at[1];
                }
#pragma unroll
                for (int j = 0; j < 2; j++) both[j] += __shfl_xor_sync(0xffffffff, both[j], 16);
                const float carried = tile == FULL ? exchanged(both[0], both[1]) : g < 4 ? both[0] : both[1];
                if (over_cells) compute(over_totals, carried, over_sample, over_unit, over_cell);
            }
        }
        if (turn == steps) break;

        most = __reduce_max_sync(0xffffffff, most);
        if (lane == 0) atomicMax(&here.most[turn % 3], most);
        if (me == 0) here.most[(turn + 1) % 3] = 0;
        ready();
        if (lane == 0) stored();
        __syncthreads();
        most = here.most[turn % 3];
        const float largest = scale * __uint_as_float(most);
        const unsigned power = most >> 23 > 15 ? most >> 23 : 15;
        const float next = __uint_as_float((262 - power) << 23);  // so that the largest is between 2^8 and 2^9
        if (most && !(largest >= 1.0f / 64 && largest < 32768)) {
            scale = next;
            if (unit < H)
#pragma unroll 1
                for (int i = 0; i < CELLS; i++) again(sample_of(i), unit);
            if (over_cells) again(over_sample, over_unit);
            __syncthreads();
        }
        unscale = __uint_as_float((254u << 23) - __float_as_uint(scale));
        scale = next;
        if (turn + 2 < steps) ask(turn + 2);
        if (lane == 0)
#pragma unroll 1
            for (int row = warp; row < rows; row += 2 * PAIRS) {
                const long long at = here.to[row];
                here.to[row] = at - samples * H;
                store(dz + 4 * at, here.dz[now][row], 4 * H);
            }
    }
    if (lane == 0) stored();

    db += 4 * H * (client * gridDim.y + blockIdx.y);
    auto sum = [&](float total) {  // over samples of a unit
        total += __shfl_xor_sync(0xffffffff, total, 1);
        return total + __shfl_xor_sync(0xffffffff, total, 2);
    };
#pragma unroll
    for (int gate = 0; gate < 4; gate++) {
        const float total = sum(totals[gate]);
        if (t == 0 && unit < H) db[gate * H + unit] = total;
    }
    if (OVER) {
        float(*parts)[32] = (float(*)[32])here.over_parts;
        __syncthreads();
        if (tile < TILES)
#pragma unroll
            for (int gate = 0; gate < 4; gate++) {
                const float total = sum(over_totals[gate]);
                if (t == 0) parts[tile * 4 + gate][g] = total;
            }
        __syncthreads();
        if (me < 16) {
            float total = 0;
            for (int n = 0; n < TILES; n++)
                for (int later = 0; later < 8; later += 4) total += parts[n * 4 + me / 4][me % 4 + later];
            db[me / 4 * H + 16 * PAIRS + me % 4] = total;
        }
    }
}

// Bytes of shared memory that a thread block of each kernel needs.
extern "C" __global__ void shared_bytes(long long* bytes) {
    bytes[0] = sizeof(ForwardShared);
    bytes[1] = sizeof(BackwardShared);
}
