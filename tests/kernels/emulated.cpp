// Runs the kernels of a .cu file on a CPU: a thread for each of theirs, which wait for each other wherever a block does.
// SOURCE: the file. THREADS: of a block. KERNELS: their names, each in RUN().

#include <algorithm>
#include <array>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __expf expf
#define __fdividef(x, y) ((x) / (y))
#define EMULATED

struct Index { int x, y, z; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim;
static std::barrier<>* block;
struct Four;
alignas(1024) static char memory[1 << 18];
static Four* room = (Four*)memory;

static void __syncthreads() { block->arrive_and_wait(); }

static float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
static unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }

static void fetch(float* to, const float* from) { *to = *from; }
static void fetched() {}

// The tensor cores of four warps: factors are cut to TF32, a comes from the threads and b from shared memory. They
// compute when they are waited for.
struct Core {
    float a[128][4];
    std::barrier<> all{128};
};
static std::array<std::unique_ptr<Core>, (THREADS + 127) / 128> cores;
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
static void run(void (*kernel)(Args...), Index grid, const long long* args) {
    gridDim = grid;
    for (auto& core : cores) core = std::make_unique<Core>();
    for (int i = 0; i < grid.x * grid.y * grid.z; i++) {
        std::barrier<> here(THREADS);
        block = &here;
        std::memset(memory, 0xff, sizeof memory);
        std::vector<std::thread> threads;
        for (int t = 0; t < THREADS; t++)
            threads.emplace_back([=] {
                threadIdx = {t, 0, 0};
                blockIdx = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
                call(kernel, args, std::index_sequence_for<Args...>());
            });
        for (auto& thread : threads) thread.join();
    }
}

#define RUN(kernel) if (std::string(name) == #kernel) run(kernel, {x, y, z}, args);

extern "C" void launch(const char* name, int x, int y, int z, const long long* args) { KERNELS }
