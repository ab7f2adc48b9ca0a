// All steps of an LSTM layer of many clients, each with its own weights, forward and back through time.
//
// A program takes some samples of one client, and its threads keep all weights in registers: H of them each, so a step
// reads nothing but what the step before left in shared memory. Threads that share a product each take every n-th of
// its terms, for four samples at a time, and exchange the sums so that each has those of one sample and unit.
//
// H: units, a multiple of 4. ROWS: samples of a program. KEEP: gates are wanted.

#define GROUPS ((ROWS + 3) / 4)  // of four samples
#define PART (H / 4)             // terms of a thread
#define ALL 0xffffffffu

struct alignas(16) Four { float at[4]; };

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// Exact to a few units in the last place, also where it is small.
__device__ __forceinline__ float tangent(float x) {
    float y = x * x;
    float near = x * (1 + y * (-1.0f / 3 + y * (2.0f / 15 + y * (-17.0f / 315 + y * (62.0f / 2835)))));
    return y < 0.0625f ? near : 2 * sigmoid(2 * x) - 1;
}

// What this thread and the one `apart` from it have of two sums: each keeps one of them.
__device__ __forceinline__ float shared(float first, float second, bool keeps_second, int apart) {
    float other = __shfl_xor_sync(ALL, keeps_second ? first : second, apart);
    return (keeps_second ? second : first) + other;
}

// sums[c][r] += of four samples r, this thread's terms of the products with its four columns c of weights.
template <int SAMPLES>
__device__ __forceinline__ void multiply(const Four* x, int apart, const float (&w)[PART][4], float (&sums)[4][4]) {
#pragma unroll
    for (int i = 0; i < PART; i++) {
        Four some = x[i * apart];
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
            for (int r = 0; r < SAMPLES; r++) sums[c][r] = fmaf(w[i][c], some.at[r], sums[c][r]);
    }
}

__device__ __forceinline__ void multiply(int group, const Four* x, int apart, const float (&w)[PART][4], float (&sums)[4][4]) {
    if (group < ROWS / 4) multiply<4>(x, apart, w, sums);
    else multiply<ROWS % 4>(x, apart, w, sums);
}

// (i, f, g, o) = z[t] + bias + w h; c' = s(f) c + s(i) tanh(g); h' = s(o) tanh(c'). Four threads share a unit.
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(
    const float* z, const float* h0, const float* c0, const float* w, const float* bias, float* hs, float* cs, float* gates,
    long long steps, long long samples, long long z_n, long long z_t, long long z_b, long long w_n, long long bias_n
) {
    __shared__ Four states[2][H][GROUPS];
    const int lane = threadIdx.x % 4, mine = threadIdx.x / 4, unit = mine < H ? mine : 0;
    const long long client = blockIdx.x;
    const int first = blockIdx.y * ROWS, batch = (int)samples;
    const long long size = samples * H;
    float weights[PART][4];
#pragma unroll
    for (int i = 0; i < PART; i++)
#pragma unroll
        for (int gate = 0; gate < 4; gate++) weights[i][gate] = w[client * w_n + (gate * H + unit) * H + 4 * i + lane];
    float cells[GROUPS];
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const int row = 4 * group + lane, b = first + row;
        const bool there = mine < H && row < ROWS && b < batch;
        const long long at = client * size + (long long)b * H + unit;
        cells[group] = there ? c0[at] : 0.0f;
        if (mine < H) states[0][unit][group].at[lane] = there ? h0[at] : 0.0f;
    }
    z += client * z_n + (long long)(first + lane) * z_b + unit;
    bias += client * bias_n + unit;
    const long long place = client * steps * size + (long long)(first + lane) * H + unit;
    hs += place;
    cs += place;
    gates += client * steps * 4 * size + (long long)(first + lane) * 4 * H + unit;
    __syncthreads();
    for (int t = 0; t < steps; t++) {
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const int row = 4 * group + lane;
            const bool there = mine < H && row < ROWS && first + row < batch;
            float inputs[4], sums[4][4] = {};
#pragma unroll
            for (int gate = 0; gate < 4; gate++) inputs[gate] = there ? z[4 * group * z_b + gate * H] + bias[gate * H] : 0.0f;
            multiply(group, &states[t & 1][lane][group], 4 * GROUPS, weights, sums);
            float gate[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const bool high = lane & 2, odd = lane & 1;
                float even = shared(sums[k][0], sums[k][2], high, 2), uneven = shared(sums[k][1], sums[k][3], high, 2);
                gate[k] = inputs[k] + shared(even, uneven, odd, 1);
            }
            const float i = sigmoid(gate[0]), f = sigmoid(gate[1]), g = tangent(gate[2]), o = sigmoid(gate[3]);
            const float c = f * cells[group] + i * g, h = o * tangent(c);
            cells[group] = c;
            if (there) {
                states[(t + 1) & 1][unit][group].at[lane] = h;
                hs[4 * group * H] = h;
                cs[4 * group * H] = c;
                if (KEEP) {
                    float* to = gates + 16 * group * H;
                    to[0] = i;
                    to[H] = f;
                    to[2 * H] = g;
                    to[3 * H] = o;
                }
            }
        }
        z += z_t;
        hs += size;
        cs += size;
        gates += 4 * size;
        __syncthreads();
    }
}

// From the last step to the first, and once more for the gradient to what the first was given. Sixteen threads share
// four units.
extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(
    const float* dhs, const float* dcs, const float* gates, const float* c0, const float* cs, const float* w,
    float* dz, float* dh0, float* dc0, long long steps, long long samples,
    long long dh_n, long long dh_t, long long dh_b, long long dc_n, long long dc_t, long long dc_b, long long w_n
) {
    __shared__ Four slopes[2][4 * H][GROUPS];
    const int lane = threadIdx.x % 16, four = threadIdx.x / 16 * 4;
    const bool exists = four < H;
    const int unit = (exists ? four : 0) + lane / 4;
    const long long client = blockIdx.x;
    const int first = blockIdx.y * ROWS, batch = (int)samples;
    const long long size = samples * H;
    float weights[PART][4];
#pragma unroll
    for (int i = 0; i < PART; i++) {
        const float* from = w + client * w_n + (16 * i + lane) * H + (exists ? four : 0);
#pragma unroll
        for (int c = 0; c < 4; c++) weights[i][c] = from[c];
    }
    for (int k = threadIdx.x; k < 4 * H * GROUPS; k += THREADS) slopes[0][k / GROUPS][k % GROUPS] = slopes[1][k / GROUPS][k % GROUPS] = Four{};
    float late[GROUPS], cells[GROUPS];  // gradients to cells from later steps; cells after the step
    const long long last = client * steps + steps - 1, place = (long long)(first + lane % 4) * H + unit;
    dhs += client * dh_n + (steps - 1) * dh_t + (long long)(first + lane % 4) * dh_b + unit;
    dcs += client * dc_n + (steps - 1) * dc_t + (long long)(first + lane % 4) * dc_b + unit;
    cs += last * size + place;
    c0 += client * size + place;
    dh0 += client * size + place;
    dc0 += client * size + place;
    gates += 4 * (last * size + (long long)(first + lane % 4) * H) + unit;
    dz += 4 * (last * size + (long long)(first + lane % 4) * H) + unit;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const int row = 4 * group + lane % 4;
        late[group] = 0.0f;
        cells[group] = exists && row < ROWS && first + row < batch ? cs[4 * group * H] : 0.0f;
    }
    __syncthreads();
    for (int back = 0; back <= steps; back++) {
        const bool over = back == steps;
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const int row = 4 * group + lane % 4;
            const bool there = exists && row < ROWS && first + row < batch, now = there && !over;
            const float* from = gates + 16 * group * H;
            const float i = now ? from[0] : 0.0f, f = now ? from[H] : 0.0f, g = now ? from[2 * H] : 0.0f;
            const float o = now ? from[3 * H] : 0.0f;
            const float* before = back == steps - 1 ? c0 : cs - size;
            const float given = now ? before[4 * group * H] : 0.0f;
            float dh = now ? dhs[4 * group * dh_b] : 0.0f, dc = now ? dcs[4 * group * dc_b] : 0.0f;
            float sums[4][4] = {};
            multiply(group, &slopes[back & 1][lane][group], 16 * GROUPS, weights, sums);
            float half[2][4], quarter[4], pair[2];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                half[0][r] = shared(sums[0][r], sums[2][r], lane & 8, 8);
                half[1][r] = shared(sums[1][r], sums[3][r], lane & 8, 8);
                quarter[r] = shared(half[0][r], half[1][r], lane & 4, 4);
            }
            pair[0] = shared(quarter[0], quarter[2], lane & 2, 2);
            pair[1] = shared(quarter[1], quarter[3], lane & 2, 2);
            dh += shared(pair[0], pair[1], lane & 1, 1);
            if (over && there) {
                dh0[4 * group * H] = dh;
                dc0[4 * group * H] = late[group];
            }
            const float out = tangent(cells[group]);
            dc += late[group] + dh * o * (1 - out * out);
            const float to_i = dc * g * i * (1 - i), to_f = dc * given * f * (1 - f), to_g = dc * i * (1 - g * g);
            const float to_o = dh * out * o * (1 - o);
            late[group] = dc * f;
            cells[group] = given;
            if (now) {
                Four (*next)[GROUPS] = slopes[(back + 1) & 1];
                next[unit][group].at[lane % 4] = to_i;
                next[H + unit][group].at[lane % 4] = to_f;
                next[2 * H + unit][group].at[lane % 4] = to_g;
                next[3 * H + unit][group].at[lane % 4] = to_o;
                float* to = dz + 16 * group * H;
                to[0] = to_i;
                to[H] = to_f;
                to[2 * H] = to_g;
                to[3 * H] = to_o;
            }
        }
        dhs -= dh_t;
        dcs -= dc_t;
        cs -= size;
        gates -= 4 * size;
        dz -= 4 * size;
        __syncthreads();
    }
}
