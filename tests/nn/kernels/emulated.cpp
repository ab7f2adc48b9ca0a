// Runs the kernels of a .cu file on a CPU: one thread block after another, with an operating-system thread for each of
// its threads, which wait for each other at the barriers of the block.
// SOURCE: the file. KERNELS: the names of its kernels, each in RUN().

#include <algorithm>
#include <array>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
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
#define __launch_bounds__(...)
#define EMULATED

struct Index { int x, y, z; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim, blockDim;
static std::barrier<>*block, *all_warps;
alignas(128) static char memory[1 << 18];  // shared memory
static char* shared_memory = memory;

static void __syncthreads() { block->arrive_and_wait(); }

static float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
static unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }

// Bulk copies between global and shared memory. They are carried out as late as allowed: copies to shared memory when a
// thread waits for them, copies from shared memory when it may be overwritten.
struct Copy { float* to; const float* from; int count; };
struct Signal { long long bits; };
struct Pending { int rows, expected, bytes, turns; std::vector<Copy> copies; };  // rows per turn, those expected so far
static std::map<Signal*, Pending> pending;
static std::mutex lock;
static thread_local std::vector<Copy> stores;

static void carry_out(std::vector<Copy>& copies) {
    for (auto& copy : copies) {
        if ((long long)copy.to % 16 || (long long)copy.from % 16 || copy.count % 4) std::abort();  // must be aligned
        std::memcpy(copy.to, copy.from, 4 * copy.count);
    }
    copies.clear();
}
static void prepare(Signal* signal, int rows) {
    std::lock_guard locked(lock);
    pending[signal] = {rows};
}
static void expect(Signal* signal, int bytes) {
    std::lock_guard locked(lock);
    pending[signal].expected++;
    pending[signal].bytes += bytes;
}
static void fetch(float* to, const float* from, int count, Signal* signal) {
    std::lock_guard locked(lock);
    pending[signal].bytes -= 4 * count;
    pending[signal].copies.push_back({to, from, count});
}
static void fetched(Signal* signal, int turn) {
    for (;; std::this_thread::yield()) {
        std::lock_guard locked(lock);
        auto& of = pending[signal];
        if (of.turns == turn && of.expected == of.rows && of.bytes == 0) {
            carry_out(of.copies);
            of.expected = 0;
            of.turns++;
        }
        if (of.turns > turn) return;
    }
}

static void ready() {}
static void store(float* to, const float* from, int count) { stores.push_back({to, from, count}); }
static void stored() { carry_out(stores); }

// What the threads of a warp exchange.
struct Warp {
    unsigned words[32][6];
    std::barrier<> barrier{32};
};
static std::vector<std::unique_ptr<Warp>> warps;
static std::vector<std::unique_ptr<std::barrier<>>> pairs;

// Every thread of the warp writes some words and reads those of all.
template <class Read>
static void exchange(const unsigned* words, int count, Read read) {
    Warp& warp = *warps[threadIdx.x / 32];
    std::copy(words, words + count, warp.words[threadIdx.x % 32]);
    warp.barrier.arrive_and_wait();
    read(warp.words);
    warp.barrier.arrive_and_wait();
}

static float __shfl_xor_sync(unsigned, float x, int by) {
    const unsigned mine = __float_as_uint(x);
    exchange(&mine, 1, [&](auto& all) { x = __uint_as_float(all[threadIdx.x % 32 ^ by][0]); });
    return x;
}
static unsigned __reduce_max_sync(unsigned, unsigned x) {
    const unsigned mine = x;
    exchange(&mine, 1, [&](auto& all) { for (auto& words : all) x = std::max(x, words[0]); });
    return x;
}
static void meet(int pair) { pairs[pair]->arrive_and_wait(); }
static void gather(bool wait) {
    auto arrived = all_warps->arrive();
    if (wait) all_warps->wait(std::move(arrived));
}
static void atomicMax(unsigned* of, unsigned x) {
    std::lock_guard locked(lock);
    *of = std::max(*of, x);
}
static float two_to(float x) { return exp2f(x); }
static float inverse(float x) { return 1 / x; }

// Tensor cores multiply float16, two of them in a word.
static unsigned halves(float first, float second) {
    const _Float16 both[2] = {(_Float16)first, (_Float16)second};
    return std::bit_cast<unsigned>(both);
}
static float half_of(unsigned both, int which) { return std::bit_cast<std::array<_Float16, 2>>(both)[which]; }

static void multiply_halves(float (&to)[4], const unsigned* mine, int terms) {
    const int me = threadIdx.x % 32;
    exchange(mine, 6, [&](auto& all) {
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

// Arguments are pointers and numbers of 64 bits.
template <class T>
static T argument(long long value) {
    if constexpr (std::is_floating_point_v<T>) return std::bit_cast<T>(value);
    else return (T)value;
}

template <class... Args, size_t... I>
static void call(void (*kernel)(Args...), const long long* args, std::index_sequence<I...>) {
    kernel(argument<Args>(args[I])...);
}

template <class... Args>
static void run(void (*kernel)(Args...), Index grid, int count, const long long* args) {
    gridDim = grid;
    blockDim = {count, 1, 1};
    while (warps.size() < (count + 31) / 32) warps.push_back(std::make_unique<Warp>());
    while (pairs.size() < (count + 63) / 64) pairs.push_back(std::make_unique<std::barrier<>>(64));
    for (int i = 0; i < grid.x * grid.y * grid.z; i++) {
        std::barrier<> of_block(count), of_warps(count);
        block = &of_block;
        all_warps = &of_warps;
        std::memset(memory, 0xff, sizeof memory);  // NaN, so that reading what was not written shows
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
