// Products of many clients' matrices by tensor cores, as exact as float32: y = a b, or y -= alpha a b.
//
// Tensor cores look at the first ten bits of a fraction (TF32), so each number is two halves and each product three; what
// is left out is below the last bit of a float32. Sums inside a tensor core are cut off, so those of a slab of `DEPTH` are
// added up outside. An infinite factor gives NaN.
//
// A program is four warps, whose tensor cores work as one. It computes tiles of 64 rows x 8 * `WIDE` columns, one after the
// other. Both halves of a come from registers, those of b from shared memory, where two slabs take turns. During the
// multiplications of a slab the next one of b is put there, and both factors of the one after it are asked for.
//
// A_DEEP, B_DEEP: the numbers of a sum lie next to each other in a, in b; else its rows, its columns do. A_APART, B_APART:
// from one row in memory to the next. Rows in memory begin and end at multiples of four numbers; those of y, of two.
// BLOCKS: programs that a processor is to run at a time. SIZE, INTO, OUTPUTS, LEFT, RIGHT, MORE: see products_cuda.operands.

#define COLUMNS (8 * WIDE)
#define ROWS 64
#define STEPS (DEPTH / 8)
#define AHEAD 2  // slabs from the one of a that is asked for to the one that is to leave memory

#ifndef EMULATED
#define THREADS 128
#endif

struct alignas(16) Four {
    float at[4];
};

struct alignas(8) Two {
    float at[2];
};

#ifndef EMULATED
// What was written to shared memory is there for tensor cores.
__device__ __forceinline__ void settle() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Multiplications run by themselves from `asked` to `finish`.
__device__ __forceinline__ void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void asked() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void finish() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// Until then nobody else reads or writes what they use.
template <int N>
__device__ __forceinline__ void hold(float (&some)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(some[i])::"memory");
}

// To where programs share it, before it is asked for.
__device__ __forceinline__ void expect(const float* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// to (64 x COLUMNS) = a (64 x 8) b (8 x COLUMNS), or += where there is `more`. See "wgmma.mma_async" in the manual of PTX
// for who has what, and for the words that say where b is.
__device__ __forceinline__ void multiply(float (&to)[4 * WIDE], const float (&a)[4], const char* b, bool more) {
    const unsigned long long kind = (DEPTH == 32 ? 1ull : 2ull) << 62 | (unsigned long long)(2 * DEPTH) << 32 | 1ull << 16;
    const unsigned long long from = kind | ((unsigned)__cvta_generic_to_shared(b) & 0x3ffff) >> 4;
    asm volatile(
        "{ .reg .pred more; setp.ne.b32 more, " MORE ", 0; wgmma.mma_async.sync.aligned.m64n" SIZE "k8.f32.tf32.tf32 {" OUTPUTS
        "}, {" LEFT "}, " RIGHT ", more, 1, 1; }"
        : INTO
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "l"(from), "r"((int)more));
}

extern __shared__ Four room[];
#endif

constexpr int HALF = COLUMNS * DEPTH * 4;  // bytes of a slab's high, or low, halves

// A thread's share of a slab of b are `ITEMS` times four numbers. Deep, `LANES` threads take a column, four numbers each;
// else each has a column, and four numbers are a chunk.
constexpr int LANES = B_DEEP ? DEPTH / 4 : THREADS, AT_ONCE = THREADS / LANES;
constexpr int ITEMS = B_DEEP ? (COLUMNS + AT_ONCE - 1) / AT_ONCE : DEPTH / 4;

__device__ __forceinline__ float rounded(float x) { return __uint_as_float((__float_as_uint(x) + 0x1000) & ~0x1fff); }

// A multiplication has eight numbers of a sum; thread t of a row gives the t-th and the (t + 4)-th, which are 2 t and
// 2 t + 1 in memory. So a column of b has chunks of four even numbers and of four odd ones; they trade places such that no
// two threads want the same bank, and tensor cores know it.
__device__ __forceinline__ int place(int column, int chunk) {
    return column * DEPTH * 4 + (DEPTH == 32 ? chunk ^ column & 7 : chunk ^ column >> 1 & 3) * 16;
}

// `from`: this thread's first number. ALL: there are `DEPTH` of a sum, else `left`. Columns that are not there stay as they are.
template <bool ALL>
__device__ __forceinline__ void load_b(Four (&to)[ITEMS], const float* from, int columns, int left) {
    const int lane = threadIdx.x % LANES, line = threadIdx.x / LANES;
    if (B_DEEP) {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            if (!ALL) to[i] = Four{};
            if (line + i * AT_ONCE < columns && (ALL || 4 * lane < left)) to[i] = *(const Four*)(from + (long long)(i * AT_ONCE) * B_APART);
        }
    } else if (lane < columns)
#pragma unroll
        for (int i = 0; i < ITEMS; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int k = i / 2 * 8 + i % 2 + 2 * j;
                to[i].at[j] = ALL || k < left ? from[(long long)k * B_APART] : 0;
            }
}

__device__ __forceinline__ void store_b(const Four (&from)[ITEMS], char* high) {
    const int lane = threadIdx.x % LANES;
    char* low = high + HALF;
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        Four big, small;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            big.at[j] = rounded(from[i].at[j]);
            small.at[j] = from[i].at[j] - big.at[j];
        }
        const int column = B_DEEP ? threadIdx.x / LANES + i * AT_ONCE : lane;
        if (!(B_DEEP && (i + 1) * AT_ONCE <= COLUMNS) && column >= COLUMNS) continue;
        if (B_DEEP)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const int to = place(column, lane / 2 * 2 + odd) + lane % 2 * 8;
                *(Two*)(high + to) = Two{big.at[odd], big.at[odd + 2]};
                *(Two*)(low + to) = Two{small.at[odd], small.at[odd + 2]};
            }
        else {
            *(Four*)(high + place(column, i)) = big;
            *(Four*)(low + place(column, i)) = small;
        }
    }
}

// What this thread gives to each multiplication, of two rows that are next to each other; deep, the second lies `below`.
template <bool ALL>
__device__ __forceinline__ void load_a(float (&to)[STEPS][4], const float* from, int below, int left) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            Two some{};
            if (ALL || 8 * s + 2 * t + (A_DEEP ? 0 : i) < left)
                some = *(const Two*)(A_DEEP ? from + 8 * s + i * below : from + (long long)(8 * s + i) * A_APART);
#pragma unroll
            for (int j = 0; j < 2; j++) to[s][A_DEEP ? i + 2 * j : 2 * i + j] = some.at[j];
        }
}

__device__ __forceinline__ void expect_a(const float* from, int below) {
#pragma unroll
    for (int s = 0; s < (A_DEEP ? 1 : STEPS); s++)
#pragma unroll
        for (int i = 0; i < 2; i++)
            expect(A_DEEP ? from + AHEAD * DEPTH + i * below : from + (long long)(AHEAD * DEPTH + 8 * s + i) * A_APART);
}

// This thread's numbers of a tile, two of each of two rows of a piece. MINUS: alpha times them is taken from what is there;
// else they are put there. `rows`, `columns`: how many there are from these on; `apart`: from one row to the next.
template <bool MINUS>
__device__ __forceinline__ void give(float* at, float (&some)[4 * WIDE], int rows, int columns, long long apart, float alpha) {
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int c = 0; c < WIDE; c++) {
            if (j >= rows || 8 * c >= columns) continue;
            Two* there = (Two*)(at + j * apart + 8 * c);
            float* mine = some + 4 * c + 2 * j;
            if (MINUS) {
                const Two before = *there;
                mine[0] = before.at[0] - alpha * mine[0];
                mine[1] = before.at[1] - alpha * mine[1];
            } else
                *there = Two{mine[0], mine[1]};
        }
}

// a (n, m, k), b (n, k, o), y (n, m, o); `a_n`, `b_n`: from one client to the next.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) product(
    const float* a, const float* b, float* y, long long n, long long m, long long k, long long o, long long a_n, long long b_n,
    double alpha
) {
    char* here = (char*)room;
    const int across = ((int)o + COLUMNS - 1) / COLUMNS, down = ((int)m + ROWS - 1) / ROWS, tiles = across * down * (int)n;
    const int my_row = threadIdx.x / 4 * 2, t = threadIdx.x % 4;

    // What is loaded next: a slab of `load_tile`, of which `to_load` are left.
    const float *a_at, *b_at;
    int load_tile = blockIdx.x, to_load, below, columns;
    auto aim = [&] {
        const int column = load_tile % across * COLUMNS, row = load_tile / across % down * ROWS + my_row, last = (int)m - 1;
        const int client = load_tile / (across * down);
        to_load = (int)k;
        columns = (int)o - column < COLUMNS ? (int)o - column : COLUMNS;
        below = row < last ? A_APART : 0;
        a_at = a + client * a_n + (A_DEEP ? (long long)(row < last ? row : last) * A_APART + 2 * t
                                          : (long long)(2 * t) * A_APART + (row < last ? row : last - 1));
        b_at = b + client * b_n + (B_DEEP ? (long long)(column + threadIdx.x / LANES) * B_APART + threadIdx.x % LANES * 4
                                          : column + threadIdx.x);
    };
    float next_a[STEPS][4];
    Four next_b[ITEMS] = {};
    auto load = [&] {
        if (load_tile >= tiles) return;
        if (to_load >= DEPTH) {
            load_a<true>(next_a, a_at, below, to_load);
            load_b<true>(next_b, b_at, columns, to_load);
        } else {
            load_a<false>(next_a, a_at, below, to_load);
            load_b<false>(next_b, b_at, columns, to_load);
        }
        if (to_load > (AHEAD + 1) * DEPTH) expect_a(a_at, below);
        a_at += A_DEEP ? DEPTH : DEPTH * A_APART;
        b_at += B_DEEP ? DEPTH : DEPTH * B_APART;
        to_load -= DEPTH;
        if (to_load <= 0) {
            load_tile += gridDim.x;
            if (load_tile < tiles) aim();
        }
    };
    float high[STEPS][4], low[STEPS][4];
    auto split = [&](const float(&from)[STEPS][4]) {
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                high[s][i] = rounded(from[s][i]);
                low[s][i] = from[s][i] - high[s][i];
            }
    };
    auto hold_factors = [&] {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            hold(high[s]);
            hold(low[s]);
        }
    };
    aim();
    load();
    store_b(next_b, here);
    settle();
    split(next_a);
    load();

    int at = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float totals[4 * WIDE] = {}, sums[4 * WIDE];
        for (int rest = (int)k; rest > 0; rest -= DEPTH) {
            __syncthreads();
            const char* now = here + at * 2 * HALF;
            at = 1 - at;
            hold(sums);
            hold_factors();
            begin();
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                multiply(sums, low[s], now + 32 * s, s > 0);
                multiply(sums, high[s], now + HALF + 32 * s, true);
                multiply(sums, high[s], now + 32 * s, true);
            }
            asked();
            store_b(next_b, here + at * 2 * HALF);
            settle();
            float after[STEPS][4];
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int i = 0; i < 4; i++) after[s][i] = next_a[s][i];
            load();  // after `settle`, which would wait for it
            finish();
            hold(sums);
            hold_factors();
#pragma unroll
            for (int i = 0; i < 4 * WIDE; i++) totals[i] += sums[i];
            split(after);
        }
        const int row = tile / across % down * ROWS + my_row, column = tile % across * COLUMNS + 2 * t;
        float* to = y + ((long long)(tile / (across * down)) * m + row) * o + column;
        if (UPDATE) give<true>(to, totals, (int)m - row, (int)o - column, o, (float)alpha);  // all, as each could wait for one stored
        give<false>(to, totals, (int)m - row, (int)o - column, o, 0);
    }
}

// Bytes of shared memory that a program needs.
extern "C" __global__ void rooms(long long* bytes) { bytes[0] = 4 * HALF; }
