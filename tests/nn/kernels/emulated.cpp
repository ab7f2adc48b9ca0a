// Runs the kernels of a .cu file on a CPU: a thread for each of theirs, which wait for each other wherever a block does.
// SOURCE: the file. KERNELS: their names, each in RUN().

#include <algorithm>
#include <array>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define EMULATED

struct Index { int x, y, z; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim, blockDim;
static std::barrier<>*block, *all_warps;
alignas(1024) static char memory[1 << 18];
static char* room = memory;

static void __syncthreads() { block->arrive_and_wait(); }

static float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
static unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }

// The tensor cores of four warps: factors are cut to TF32, a comes from the threads and b from shared memory. They
// compute when they are waited for.
struct Core {
    float a[128][4];
    std::barrier<> all{128};
};
static std::vector<std::unique_ptr<Core>> cores;
static thread_local std::vector<std::function<void()>> orders;

static void settle() {}
static void begin() {}
static void asked() {}
static void expect(const float*) {}

static float cut(float x) { return __uint_as_float(__float_as_uint(x) & ~0x1fff); }

#ifdef DEPTH
template <size_t N>
static void hold(float (&)[N]) {}

template <size_t N>
static void multiply(float (&to)[N], const float (&a)[4], const char* b, bool more) {
    std::array<float, 4> mine = {cut(a[0]), cut(a[1]), cut(a[2]), cut(a[3])};
    orders.push_back([=, &to] {
        Core& core = *cores[threadIdx.x / 128];
        const int me = threadIdx.x % 128;
        std::copy(mine.begin(), mine.end(), core.a[me]);
        core.all.arrive_and_wait();
        for (int i = 0; i < N; i++) {
            float sum = more ? to[i] : 0;
            for (int k = 0; k < 8; k++) {
                const int column = i / 4 * 8 + me % 4 * 2 + i % 2;
                long long at = b - memory + column * DEPTH * 4 + k * 4;
                at ^= (at >> 7 & (DEPTH == 32 ? 7 : 3)) << 4;  // chunks that trade places
                sum += core.a[me / 4 * 4 + k % 4][k / 4 * 2 + i / 2 % 2] * cut(*(float*)(memory + at));
            }
            to[i] = sum;
        }
        core.all.arrive_and_wait();
    });
}

static void finish() {
    for (auto& order : orders) order();
    orders.clear();
}
#endif

// Rows of numbers, which come when they are waited for and go when they must have gone.
struct Row { float* to; const float* from; int count; };
struct Signal { long long bits; };
struct Coming { int rows, asked, bytes, turns; std::vector<Row> all; };  // rows in a turn, those that were asked for, bytes to come
static std::map<Signal*, Coming> coming;
static std::mutex alone;
static thread_local std::vector<Row> going;

static void move(std::vector<Row>& rows) {
    for (auto& row : rows) {
        if ((long long)row.to % 16 || (long long)row.from % 16 || row.count % 4) std::abort();
        std::memcpy(row.to, row.from, 4 * row.count);
    }
    rows.clear();
}
static void prepare(Signal* signal, int rows) {
    std::lock_guard lock(alone);
    coming[signal] = {rows};
}
static void expect(Signal* signal, int bytes) {
    std::lock_guard lock(alone);
    coming[signal].asked++;
    coming[signal].bytes += bytes;
}
static void fetch(float* to, const float* from, int count, Signal* signal) {
    std::lock_guard lock(alone);
    coming[signal].bytes -= 4 * count;
    coming[signal].all.push_back({to, from, count});
}
static void fetched(Signal* signal, int turn) {
    for (;; std::this_thread::yield()) {
        std::lock_guard lock(alone);
        auto& of = coming[signal];
        if (of.turns == turn && of.asked == of.rows && of.bytes == 0) {
            move(of.all);
            of.asked = 0;
            of.turns++;
        }
        if (of.turns > turn) return;
    }
}

static void ready() {}
static void store(float* to, const float* from, int count) { going.push_back({to, from, count}); }
static void stored() { move(going); }

// What the threads of a warp show each other.
struct Warp {
    unsigned at[32][6];
    std::barrier<> all{32};
};
static std::vector<std::unique_ptr<Warp>> warps;
static std::vector<std::unique_ptr<std::barrier<>>> pairs;

template <class Look>
static void shown(const unsigned* some, int count, Look look) {
    Warp& warp = *warps[threadIdx.x / 32];
    std::copy(some, some + count, warp.at[threadIdx.x % 32]);
    warp.all.arrive_and_wait();
    look(warp.at);
    warp.all.arrive_and_wait();
}

static float __shfl_xor_sync(unsigned, float x, int by) {
    const unsigned mine = __float_as_uint(x);
    shown(&mine, 1, [&](auto& all) { x = __uint_as_float(all[threadIdx.x % 32 ^ by][0]); });
    return x;
}
static unsigned __reduce_max_sync(unsigned, unsigned x) {
    const unsigned mine = x;
    shown(&mine, 1, [&](auto& all) { for (auto& of : all) x = std::max(x, of[0]); });
    return x;
}
static void meet(int pair) { pairs[pair]->arrive_and_wait(); }
static void gather(bool wait) {
    auto arrived = all_warps->arrive();
    if (wait) all_warps->wait(std::move(arrived));
}
static void atomicMax(unsigned* of, unsigned x) {
    std::lock_guard lock(alone);
    *of = std::max(*of, x);
}
static float two_to(float x) { return exp2f(x); }
static float inverse(float x) { return 1 / x; }

// Its tensor core, which takes halves, two in a word.
static unsigned halves(float first, float second) {
    const _Float16 both[2] = {(_Float16)first, (_Float16)second};
    return std::bit_cast<unsigned>(both);
}
static float half_of(unsigned both, int which) { return std::bit_cast<std::array<_Float16, 2>>(both)[which]; }

static void multiply_halves(float (&to)[4], const unsigned* mine, int terms) {
    const int me = threadIdx.x % 32;
    shown(mine, 6, [&](auto& all) {
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < terms; k++)
                to[i] += half_of(all[me / 4 * 4 + k % 8 / 2][k / 8 * 2 + i / 2], k % 2) *
                         half_of(all[(me % 4 * 2 + i % 2) * 4 + k % 8 / 2][4 + k / 8], k % 2);
    });
}
static void mma(float (&to)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const unsigned mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    multiply_halves(to, mine, 16);
}
static void mma(float (&to)[4], const unsigned (&a)[2], unsigned b) {
    const unsigned mine[6] = {a[0], a[1], 0, 0, b, 0};
    multiply_halves(to, mine, 8);
}

#include SOURCE

template <class T>
static T given(long long value) {
    if constexpr (std::is_floating_point_v<T>) return std::bit_cast<T>(value);
    else return (T)value;
}

template <class... Args, size_t... I>
static void call(void (*kernel)(Args...), const long long* args, std::index_sequence<I...>) {
    kernel(given<Args>(args[I])...);
}

template <class... Args>
static void run(void (*kernel)(Args...), Index grid, int count, const long long* args) {
    gridDim = grid;
    blockDim = {count, 1, 1};
    while (cores.size() < (count + 127) / 128) cores.push_back(std::make_unique<Core>());
    while (warps.size() < (count + 31) / 32) warps.push_back(std::make_unique<Warp>());
    while (pairs.size() < (count + 63) / 64) pairs.push_back(std::make_unique<std::barrier<>>(64));
    for (int i = 0; i < grid.x * grid.y * grid.z; i++) {
        std::barrier<> here(count), more(count);
        block = &here;
        all_warps = &more;
        std::memset(memory, 0xff, sizeof memory);
        std::vector<std::thread> threads;
        for (int t = 0; t < count; t++)
            threads.emplace_back([=] {
                threadIdx = {t, 0, 0};
                blockIdx = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
                call(kernel, args, std::index_sequence_for<Args...>());
            });
        for (auto& thread : threads) thread.join();
    }
}

#define RUN(kernel) if (std::string(name) == #kernel) run(kernel, {x, y, z}, threads, args);

extern "C" void launch(const char* name, int x, int y, int z, int threads, const long long* args) { KERNELS }
