// Products of many clients' matrices by tensor cores, as exact as float32: y = a b, or y -= alpha a b.
//
// A program computes a tile of one client's result, or a part of its sums. Slabs of both factors, 16 deep, come into shared
// memory while earlier ones are multiplied. Tensor cores look at the first ten bits of a fraction (TF32), so each number is
// two halves and each product three; what is left out is below the last bit of a float32. Sums inside a tensor core are cut
// off, so those of a slab are added up outside. An infinite factor gives NaN.
//
// A warp computes `HIGH` x `WIDE` pieces of 16 x 8; a tile has `DOWN` x `ACROSS` warps. A_DEEP, B_DEEP: the numbers of a sum
// lie next to each other in a, in b; else its rows, its columns do. Rows in memory begin and end at multiples of four
// numbers. STAGES: slabs in shared memory. BLOCKS: programs that a processor is to run at a time.

#define DEPTH 16
#define THREADS (32 * DOWN * ACROSS)

struct alignas(16) Four {
    float at[4];
};

struct alignas(8) Two {
    float at[2];
};

#ifndef EMULATED
__device__ __forceinline__ void fetch(Four* to, const float* from, bool there) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void asked() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the last `LATE` that were asked for are there.
template <int LATE>
__device__ __forceinline__ void fetched() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATE) : "memory");
}

// to (16 x 8) += a (16 x 8) b (8 x 8); see "mma.m16n8k8" in the manual of PTX for who has what.
__device__ __forceinline__ void mma(float (&to)[4], const float (&a)[4], const float (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

extern __shared__ Four room[];
#endif

__device__ __forceinline__ float rounded(float x) { return __uint_as_float((__float_as_uint(x) + 0x1000) & ~0x1fff); }

// The least power of two that is not smaller.
__device__ constexpr int power(int least) { return least & least - 1 ? power(least + 1) : least; }

// A slab of one factor: SIZE rows of a or columns of b. Places are such that no two threads that load a fragment, or
// eight that fill, want the same bank: deep, lines of a sum lie in pairs that trade places; else every four lines leave a gap.
template <int SIZE, bool DEEP>
struct Slab {
    static constexpr int GROUP = 4 * SIZE + 8;
    Four at[(DEEP ? SIZE * DEPTH : 4 * GROUP) / 4];

    __device__ __forceinline__ static int place(int side, int k) {
        return DEEP ? (side ^ (side >> 1 & 1)) * DEPTH + k : k / 4 * GROUP + k % 4 * SIZE + side;
    }

    template <class T>
    __device__ __forceinline__ T load(int side, int k) const {
        return *(const T*)((const float*)at + place(side, k));
    }

    // To fill it, `LANES` threads take a line as it lies in memory, four numbers each.
    static constexpr int LINES = DEEP ? SIZE : DEPTH, LANES = power((DEEP ? DEPTH : SIZE) / 4), AT_ONCE = THREADS / LANES;

    // From the first number of a slab to the first of this thread.
    __device__ __forceinline__ static long long mine(long long apart) {
        return threadIdx.x / LANES * apart + threadIdx.x % LANES * 4;
    }

    // `from`: this thread's first number. `apart`: from one line in memory to the next. `lines` and `columns` are those that are there.
    __device__ __forceinline__ void ask(const float* from, int apart, int lines, int columns) {
        const int line = threadIdx.x / LANES, column = threadIdx.x % LANES * 4;
        const bool inside = DEEP || column < SIZE;
#pragma unroll
        for (int first = 0; first < LINES; first += AT_ONCE) {
            const bool there = first + line < lines && column < columns;
            const int to = DEEP ? place(first + line, column) : place(column, first + line);
            if (inside && (first + AT_ONCE <= LINES || first + line < LINES))
                fetch(&at[to / 4], from + (long long)first * apart, there);
        }
    }

    // The numbers of two lines (first + 2 group, and the next one), for the terms of this thread.
    template <int TERMS>
    __device__ __forceinline__ void pair(float (&to)[2][TERMS], int first) const {
        const int group = threadIdx.x % 32 / 4, k = threadIdx.x % 4 * TERMS;
        if (DEEP) {
#pragma unroll
            for (int j = 0; j < 2; j++) line(to[j], first + 2 * group + j);
        } else
#pragma unroll
            for (int i = 0; i < TERMS; i++) {
                const Two two = load<Two>(first + 2 * group, k + i);
                to[0][i] = two.at[0];
                to[1][i] = two.at[1];
            }
    }

    // Of one line.
    template <int TERMS>
    __device__ __forceinline__ void line(float (&to)[TERMS], int side) const {
        const int k = threadIdx.x % 4 * TERMS;
        if (!DEEP) {
#pragma unroll
            for (int i = 0; i < TERMS; i++) to[i] = load<float>(side, k + i);
        } else if (TERMS == 4) {
            const Four four = load<Four>(side, k);
#pragma unroll
            for (int i = 0; i < TERMS; i++) to[i] = four.at[i];
        } else {
            const Two two = load<Two>(side, k);
            to[0] = two.at[0];
            to[1] = two.at[1];
        }
    }
};

typedef Slab<16 * HIGH * DOWN, A_DEEP> Left;
typedef Slab<8 * WIDE * ACROSS, B_DEEP> Right;

struct Room {
    Left left[STAGES];
    Right right[STAGES];
};

// totals += a b, of 4 * TERMS numbers each: thread t of a group has `TERMS` of them. Terms 2 h and 2 h + 1 are the
// t-th and the (t + 4)-th of multiplication h.
template <int TERMS>
__device__ __forceinline__ void multiply(float (&totals)[HIGH][WIDE][4], const Left& left, const Right& right, int row, int column) {
    constexpr int HALVES = TERMS / 2;
    float high[HIGH][HALVES][4], low[HIGH][HALVES][4];
#pragma unroll
    for (int r = 0; r < HIGH; r++) {
        float some[2][TERMS];
        left.template pair<TERMS>(some, row + 16 * r);
#pragma unroll
        for (int i = 0; i < TERMS; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float big = rounded(some[j][i]);
                high[r][i / 2][i % 2 * 2 + j] = big;
                low[r][i / 2][i % 2 * 2 + j] = some[j][i] - big;
            }
    }
#pragma unroll
    for (int c = 0; c < WIDE; c += 2) {
        const int count = c + 1 < WIDE ? 2 : 1;
        float some[2][TERMS], sums[2][HIGH][4] = {};
        if (count == 2)
            right.template pair<TERMS>(some, column + 8 * c);
        else
            right.template line<TERMS>(some[0], column + 8 * c + threadIdx.x % 32 / 4);
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            float big[2][2], small[2][2];
#pragma unroll
            for (int j = 0; j < count; j++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float all = some[j][2 * h + i];
                    big[j][i] = rounded(all);
                    small[j][i] = all - big[j][i];
                }
#pragma unroll
            for (int j = 0; j < count; j++)
#pragma unroll
                for (int r = 0; r < HIGH; r++) mma(sums[j][r], low[r][h], big[j]);
#pragma unroll
            for (int j = 0; j < count; j++)
#pragma unroll
                for (int r = 0; r < HIGH; r++) mma(sums[j][r], high[r][h], small[j]);
#pragma unroll
            for (int j = 0; j < count; j++)
#pragma unroll
                for (int r = 0; r < HIGH; r++) mma(sums[j][r], high[r][h], big[j]);
        }
#pragma unroll
        for (int j = 0; j < count; j++)
#pragma unroll
            for (int r = 0; r < HIGH; r++)
#pragma unroll
                for (int i = 0; i < 4; i++) totals[r][c + j][i] += sums[j][r][i];
    }
}

template <class T>
__device__ __forceinline__ void give(float* y, T some, float alpha) {
    if (UPDATE) {
        const T before = *(const T*)y;
#pragma unroll
        for (int i = 0; i < sizeof(T) / sizeof(float); i++) some.at[i] = before.at[i] - alpha * some.at[i];
    }
    *(T*)y = some;
}

// a (n, m, k), b (n, k, o), y (parts, n, m, o): a grid of tiles x n x parts. `a_apart`, `b_apart`: from one row in memory
// to the next. Parts of k are `span` long.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) product(
    const float* a, const float* b, float* y, long long m, long long k, long long o,
    long long a_n, long long a_apart, long long b_n, long long b_apart, long long span, double alpha
) {
    Room& here = *(Room*)room;
    const int wide = 8 * WIDE * ACROSS, tall = 16 * HIGH * DOWN, tiles = ((int)o + wide - 1) / wide;
    const int first_row = (int)blockIdx.x / tiles * tall, first_column = (int)blockIdx.x % tiles * wide;
    const int start = (int)(blockIdx.z * span), left = (int)(k - start < span ? k - start : span);
    a += blockIdx.y * a_n + (A_DEEP ? first_row * a_apart + start : start * a_apart + first_row) + Left::mine(a_apart);
    b += blockIdx.y * b_n + (B_DEEP ? first_column * b_apart + start : start * b_apart + first_column) + Right::mine(b_apart);
    y += ((long long)blockIdx.z * gridDim.y + blockIdx.y) * m * o + first_row * o + first_column;
    const int rows = (int)m - first_row, columns = (int)o - first_column;

    const int warp = threadIdx.x / 32, row = warp / ACROSS * 16 * HIGH, column = warp % ACROSS * 8 * WIDE;
    const bool busy = row < rows && column < columns;
    int to_ask = left, ask_at = 0, at = 0;
    auto ask = [&] {
        if (to_ask > 0) {
            here.left[ask_at].ask(a, (int)a_apart, A_DEEP ? rows : to_ask, A_DEEP ? to_ask : rows);
            here.right[ask_at].ask(b, (int)b_apart, B_DEEP ? columns : to_ask, B_DEEP ? to_ask : columns);
            a += A_DEEP ? DEPTH : DEPTH * a_apart;
            b += B_DEEP ? DEPTH : DEPTH * b_apart;
            to_ask -= DEPTH;
            ask_at = ask_at + 1 < STAGES ? ask_at + 1 : 0;
        }
        asked();
    };
#pragma unroll
    for (int s = 0; s + 1 < STAGES; s++) ask();

    float totals[HIGH][WIDE][4] = {};
    for (int rest = left; rest > 0; rest -= DEPTH) {
        fetched<STAGES - 2>();
        __syncthreads();
        ask();
        if (busy) {
            if (rest > DEPTH / 2)
                multiply<4>(totals, here.left[at], here.right[at], row, column);
            else
                multiply<2>(totals, here.left[at], here.right[at], row, column);
        }
        at = at + 1 < STAGES ? at + 1 : 0;
    }

    const int group = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < HIGH; r++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int my_row = row + 16 * r + 2 * group + j;
            if (my_row >= rows) continue;
            float* to = y + my_row * o;
#pragma unroll
            for (int c = 0; c < WIDE; c += 2) {
                if (c + 1 < WIDE) {
                    const int mine = column + 8 * c + 4 * t;
                    const float *one = totals[r][c] + 2 * j, *other = totals[r][c + 1] + 2 * j;
                    if (mine < columns) give(to + mine, Four{one[0], other[0], one[1], other[1]}, (float)alpha);
                } else {
                    const int mine = column + 8 * c + 2 * t;
                    if (mine < columns) give(to + mine, Two{totals[r][c][2 * j], totals[r][c][2 * j + 1]}, (float)alpha);
                }
            }
        }
}

// Bytes of shared memory that a program needs.
extern "C" __global__ void rooms(long long* bytes) { bytes[0] = sizeof(Room); }
