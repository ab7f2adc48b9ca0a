// Runs the kernels of a .cu file on a CPU: a thread for each of theirs, which wait for each other wherever a block does.
// SOURCE: the file. THREADS: of a block.

#include <barrier>
#include <cmath>
#include <cstring>
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

struct Index { int x, y; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim;
static std::barrier<>* block;
struct Four;
alignas(16) static char memory[1 << 18];
static Four* room = (Four*)memory;

static void __syncthreads() { block->arrive_and_wait(); }

static void fetch(float* to, const float* from) { *to = *from; }
static void fetched() {}

#include SOURCE

template <class... Args, size_t... I>
static void call(void (*kernel)(Args...), const long long* args, std::index_sequence<I...>) {
    kernel((Args)args[I]...);
}

template <class... Args>
static void run(void (*kernel)(Args...), int width, int height, const long long* args) {
    gridDim = {width, height};
    for (int x = 0; x < width; x++)
        for (int y = 0; y < height; y++) {
            std::barrier<> here(THREADS);
            block = &here;
            std::memset(memory, 0xff, sizeof memory);
            std::vector<std::thread> threads;
            for (int t = 0; t < THREADS; t++)
                threads.emplace_back([=] {
                    threadIdx = {t, 0};
                    blockIdx = {x, y};
                    call(kernel, args, std::index_sequence_for<Args...>());
                });
            for (auto& thread : threads) thread.join();
        }
}

extern "C" void launch(const char* name, int width, int height, const long long* args) {
    if (std::string(name) == "forward") run(forward, width, height, args);
    else if (std::string(name) == "backward") run(backward, width, height, args);
    else rooms((long long*)args[0]);
}
