// Runs the kernels of a .cu file on a CPU: a thread for each of theirs, which wait for each other wherever a block does.
// SOURCE: the file. THREADS: of a block. KERNELS: their names, each in RUN().

#include <array>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
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
alignas(16) static char memory[1 << 18];
static Four* room = (Four*)memory;

static void __syncthreads() { block->arrive_and_wait(); }

static float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
static unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }

static void fetch(float* to, const float* from) { *to = *from; }
static void fetched() {}

// Four numbers, or zeros, which come as late as they may.
struct Order { void* to; const float* from; bool there; };
static thread_local std::deque<std::vector<Order>> orders;

static void fetch(void* to, const float* from, bool there) {
    if (orders.empty()) orders.emplace_back();
    orders.back().push_back({to, from, there});
}
static void asked() { orders.emplace_back(); }

template <int LATE>
static void fetched() {
    for (; orders.size() > LATE + 1; orders.pop_front())
        for (auto& o : orders.front()) o.there ? (void)std::memcpy(o.to, o.from, 16) : (void)std::memset(o.to, 0, 16);
}

// A warp's tensor core: what each thread gives, cut to TF32.
struct Core {
    float a[32][4], b[32][2];
    std::barrier<> all{32};
};
static std::array<std::unique_ptr<Core>, (THREADS + 31) / 32> cores;

static void mma(float (&to)[4], const float (&a)[4], const float (&b)[2]) {
    auto cut = [](float x) { return __uint_as_float(__float_as_uint(x) & ~0x1fff); };
    Core& core = *cores[threadIdx.x / 32];
    const int me = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) core.a[me][i] = cut(a[i]);
    for (int i = 0; i < 2; i++) core.b[me][i] = cut(b[i]);
    core.all.arrive_and_wait();
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 8; k++)
            to[i] += core.a[me / 4 * 4 + k % 4][k / 4 * 2 + i / 2] * core.b[(me % 4 * 2 + i % 2) * 4 + k % 4][k / 4];
    core.all.arrive_and_wait();
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
