// All steps of an LSTM layer of many clients, each with its own weights, forward and back through time.
//
// A program takes some samples of one client, and its threads keep all weights in registers, so a step reads nothing else
// but what the step before left in shared memory, and what was asked for a step ago. First each thread computes a slice
// of the sums, for four columns of weights and all samples; then each takes a unit of some of the samples, always the same
// ones, and adds up their slices.
//
// H: units, a multiple of 4. ROWS: samples of a program. KEEP: gates are wanted. SLICES: of the product with h; there are
// four times as many of the product on the way back. THREADS: H for every slice, in whole warps.

#define GROUPS ((ROWS + 3) / 4)               // of four samples
#define TERMS ((H + SLICES - 1) / SLICES)     // of a slice
#define CELLS ((ROWS + SLICES - 1) / SLICES)  // samples of whose units a thread takes one

struct alignas(16) Four {
    float at[4];
};

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// Exact to a few units in the last place, also where it is small.
__device__ __forceinline__ float tangent(float x) {
    float y = x * x;
    float near = x * (1 + y * (-1.0f / 3 + y * (2.0f / 15 + y * (-17.0f / 315 + y * (62.0f / 2835)))));
    return y < 0.0625f ? near : 2 * sigmoid(2 * x) - 1;
}

#ifndef EMULATED
__device__ __forceinline__ void fetch(float* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from));
}

__device__ __forceinline__ void fetched() { asm volatile("cp.async.wait_all;" ::: "memory"); }

extern __shared__ Four room[];
#endif

// Samples of a program that has so many to go.
__device__ __forceinline__ int rows_of(long long left) { return left < ROWS ? (int)left : ROWS; }

// sums[r] = the terms of a slice for the samples 4 * group + r; samples are `apart` in `sums`.
template <int SAMPLES>
__device__ __forceinline__ void multiply(const Four (&weights)[TERMS], const Four (*x)[GROUPS], Four* sums, int apart) {
    Four found[SAMPLES] = {};
#pragma unroll
    for (int i = 0; i < TERMS; i++) {
        const Four some = x[i][0];
#pragma unroll
        for (int r = 0; r < SAMPLES; r++)
#pragma unroll
            for (int c = 0; c < 4; c++) found[r].at[c] = fmaf(weights[i].at[c], some.at[r], found[r].at[c]);
    }
#pragma unroll
    for (int r = 0; r < SAMPLES; r++) sums[r * apart] = found[r];
}

__device__ __forceinline__ void multiply_all(const Four (&weights)[TERMS], const Four (*x)[GROUPS], Four* sums, int apart) {
#pragma unroll
    for (int group = 0; group < ROWS / 4; group++)
        multiply<4>(weights, (const Four(*)[GROUPS])(x[0] + group), sums + 4 * group * apart, apart);
#if ROWS % 4
    multiply<ROWS % 4>(weights, (const Four(*)[GROUPS])(x[0] + ROWS / 4), sums + ROWS / 4 * 4 * apart, apart);
#endif
}

// -- forward ----------------------------------------------------------------------------------------------------------

struct ForwardRoom {
    Four states[SLICES * TERMS][GROUPS];  // of four samples
    Four sums[SLICES][ROWS][H];           // of a unit's four gates
    float inputs[2][CELLS][4][THREADS];
};

// (i, f, g, o) = z[t] + bias + w h; c' = s(f) c + s(i) tanh(g); h' = s(o) tanh(c')
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(
    const float* z, const float* h0, const float* c0, const float* w, const float* bias, float* hs, float* cs, float* gates,
    long long steps, long long samples, long long z_n, long long z_t, long long z_b, long long w_n, long long bias_n
) {
    ForwardRoom& here = *(ForwardRoom*)room;
    const int me = threadIdx.x, slice = me / H, unit = me % H;  // of the product; of cells: samples and unit
    const long long client = blockIdx.x, size = samples * H;
    const int first = blockIdx.y * ROWS, rows = slice < SLICES ? rows_of(samples - first) : 0;
    w += client * w_n;
    bias += client * bias_n;
    z += client * z_n + first * z_b;
    h0 += client * size + first * H;
    c0 += client * size + first * H;
    hs += client * steps * size + first * H;
    cs += client * steps * size + first * H;
    gates += 4 * (client * steps * size + first * H);

    Four weights[TERMS];
#pragma unroll
    for (int i = 0; i < TERMS; i++)
#pragma unroll
        for (int gate = 0; gate < 4; gate++) {
            const int k = slice * TERMS + i;
            weights[i].at[gate] = slice < SLICES && k < H ? w[(gate * H + unit) * H + k] : 0;
        }
    auto ask = [&](int step) {
#pragma unroll
        for (int cell = 0; cell < CELLS; cell++) {
            const int row = cell * SLICES + slice;
            if (row < rows)
#pragma unroll
                for (int gate = 0; gate < 4; gate++)
                    fetch(&here.inputs[step & 1][cell][gate][me], z + row * z_b + gate * H + unit);
        }
    };
    ask(0);
    for (int k = me; k < SLICES * TERMS * GROUPS; k += THREADS) ((Four*)here.states)[k] = Four{};
    __syncthreads();
    float cells[CELLS];
#pragma unroll
    for (int cell = 0; cell < CELLS; cell++) {
        const int row = cell * SLICES + slice;
        if (row >= rows) continue;
        cells[cell] = c0[row * H + unit];
        here.states[unit][row / 4].at[row % 4] = h0[row * H + unit];
    }
    __syncthreads();

    for (int step = 0; step < steps; step++) {
        z += z_t;
        fetched();
        if (step + 1 < steps) ask(step + 1);
        if (slice < SLICES) multiply_all(weights, &here.states[slice * TERMS], &here.sums[slice][0][unit], H);
        __syncthreads();
#pragma unroll
        for (int cell = 0; cell < CELLS; cell++) {
            const int row = cell * SLICES + slice, at = row * H + unit;
            if (row >= rows) continue;
            float sums[4];
#pragma unroll
            for (int gate = 0; gate < 4; gate++) sums[gate] = here.inputs[step & 1][cell][gate][me] + bias[gate * H + unit];
#pragma unroll
            for (int s = 0; s < SLICES; s++)
#pragma unroll
                for (int gate = 0; gate < 4; gate++) sums[gate] += here.sums[s][row][unit].at[gate];
            const float i = sigmoid(sums[0]), f = sigmoid(sums[1]), g = tangent(sums[2]), o = sigmoid(sums[3]);
            const float c = f * cells[cell] + i * g, h = o * tangent(c);
            cells[cell] = c;
            here.states[unit][row / 4].at[row % 4] = h;
            hs[at] = h;
            cs[at] = c;
            if (KEEP) {
                float* to = gates + 4 * row * H + unit;
                to[0] = i;
                to[H] = f;
                to[2 * H] = g;
                to[3 * H] = o;
            }
        }
        hs += size;
        cs += size;
        gates += 4 * size;
        __syncthreads();
    }
}

// -- back through time ------------------------------------------------------------------------------------------------

struct BackwardRoom {
    Four slopes[4 * SLICES * TERMS][GROUPS];
    Four sums[4 * SLICES][ROWS][H / 4];
    float inputs[2][CELLS][7][THREADS];  // gates, the cell that the step was given, gradients to h and c
};

// From the last step to the first, and once more for the gradient to what the first was given. `db` is the sum of `dz`
// over steps and the samples of a program.
extern "C" __global__ void __launch_bounds__(THREADS, 1) backward(
    const float* dhs, const float* dcs, const float* gates, const float* c0, const float* cs, const float* w,
    float* dz, float* dh0, float* dc0, float* db, long long steps, long long samples,
    long long dh_n, long long dh_t, long long dh_b, long long dc_n, long long dc_t, long long dc_b, long long w_n
) {
    BackwardRoom& here = *(BackwardRoom*)room;
    const int me = threadIdx.x, slice = me / (H / 4), column = me % (H / 4);  // of the product
    const int place = me / H, unit = me % H;                                  // of cells: samples and unit
    const long long client = blockIdx.x, size = samples * H, end = client * steps + steps - 1;
    const int first = blockIdx.y * ROWS, rows = place < SLICES ? rows_of(samples - first) : 0;
    w += client * w_n;
    cs += end * size + first * H;
    c0 += client * size + first * H;
    dh0 += client * size + first * H;
    dc0 += client * size + first * H;
    gates += 4 * (end * size + first * H);
    dz += 4 * (end * size + first * H);
    dhs += client * dh_n + (steps - 1) * dh_t + first * dh_b;
    dcs += client * dc_n + (steps - 1) * dc_t + first * dc_b;
    db += 4 * H * (client * gridDim.y + blockIdx.y);

    Four weights[TERMS];
#pragma unroll
    for (int i = 0; i < TERMS; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int k = slice * TERMS + i;
            weights[i].at[c] = slice < 4 * SLICES && k < 4 * H ? w[k * H + 4 * column + c] : 0;
        }
    auto ask = [&](int step) {
        const float* before = step + 1 < steps ? cs - (step + 1) * size : c0;
#pragma unroll
        for (int cell = 0; cell < CELLS; cell++) {
            const int row = cell * SLICES + place;
            if (row >= rows) continue;
            auto* to = here.inputs[step & 1][cell];
#pragma unroll
            for (int gate = 0; gate < 4; gate++)
                fetch(&to[gate][me], gates - step * 4 * size + (4 * row + gate) * H + unit);
            fetch(&to[4][me], before + row * H + unit);
            fetch(&to[5][me], dhs - step * dh_t + row * dh_b + unit);
            fetch(&to[6][me], dcs - step * dc_t + row * dc_b + unit);
        }
    };
    ask(0);
    for (int k = me; k < 4 * SLICES * TERMS * GROUPS; k += THREADS) ((Four*)here.slopes)[k] = Four{};
    float late[CELLS], cells[CELLS];  // gradients to cells from later steps; cells after the step
    Four totals = {};                 // of gradients to gates
#pragma unroll
    for (int cell = 0; cell < CELLS; cell++) {
        const int row = cell * SLICES + place;
        late[cell] = 0;
        if (row < rows) cells[cell] = cs[row * H + unit];
    }
    __syncthreads();

    for (int step = 0; step <= steps; step++) {
        fetched();
        if (step + 1 < steps) ask(step + 1);
        if (slice < 4 * SLICES) multiply_all(weights, &here.slopes[slice * TERMS], &here.sums[slice][0][column], H / 4);
        __syncthreads();
#pragma unroll
        for (int cell = 0; cell < CELLS; cell++) {
            const int row = cell * SLICES + place, at = row * H + unit;
            if (row >= rows) continue;
            float carried = 0;
#pragma unroll
            for (int s = 0; s < 4 * SLICES; s++) carried += here.sums[s][row][unit / 4].at[unit % 4];
            if (step == steps) {
                dh0[at] = carried;
                dc0[at] = late[cell];
                continue;
            }
            auto* given = here.inputs[step & 1][cell];
            const float i = given[0][me], f = given[1][me], g = given[2][me], o = given[3][me], before = given[4][me];
            const float dh = given[5][me] + carried, out = tangent(cells[cell]);
            const float dc = given[6][me] + late[cell] + dh * o * (1 - out * out);
            const float to[4] = {dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g), dh * out * o * (1 - o)};
            late[cell] = dc * f;
            cells[cell] = before;
#pragma unroll
            for (int gate = 0; gate < 4; gate++) {
                here.slopes[gate * H + unit][row / 4].at[row % 4] = to[gate];
                dz[(4 * row + gate) * H + unit] = to[gate];
                totals.at[gate] += to[gate];
            }
        }
        dz -= 4 * size;
        __syncthreads();
    }

    Four* parts = (Four*)here.sums;
    if (place < SLICES) parts[me] = totals;
    __syncthreads();
    if (place > 0) return;
#pragma unroll
    for (int gate = 0; gate < 4; gate++) {
        float total = 0;
        for (int p = 0; p < SLICES; p++) total += parts[p * H + unit].at[gate];
        db[gate * H + unit] = total;
    }
}

// Bytes of shared memory that a program of each needs.
extern "C" __global__ void rooms(long long* bytes) {
    bytes[0] = sizeof(ForwardRoom);
    bytes[1] = sizeof(BackwardRoom);
}
