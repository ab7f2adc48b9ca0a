// All steps of an LSTM layer of many clients, each with its own weights, forward and back through time.
//
// A program takes some samples of one client, and its threads keep all weights in registers, so a step reads nothing else
// but what the step before left in shared memory, and what was asked for a step ago. First each thread computes a slice
// of the sums, for four columns of weights and many samples; then each takes a unit of a sample, always the same one, and
// adds up its slices. While they do this for one half of the samples, they compute the sums of the other: one waits for
// memory and for special functions, one for multiplications.
//
// H: units, a multiple of 4. ROWS: samples of a program, at most twice SLICES. KEEP: gates are wanted. SLICES: of the
// product with h; there are four times as many of the product on the way back. THREADS: H for every slice, in whole warps.

#define TERMS ((H + SLICES - 1) / SLICES)  // of a slice
#define HALF ((ROWS + 1) / 2)              // samples
#define GROUPS ((HALF + 3) / 4)            // of four samples

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

// Of a half of the samples, in groups of four.
template <int SIZE>
struct States {
    Four at[GROUPS][SIZE];
    __device__ float& of(int sample, int k) { return at[sample / 4][k].at[sample % 4]; }
};

// sums[r] = the terms of a slice, which begin at `first`, for sample r; samples are `apart` in `sums`.
template <int SIZE>
__device__ __forceinline__ void multiply(const Four (&weights)[TERMS], const States<SIZE>& x, int first, Four* sums, int apart) {
    Four found[HALF] = {};
#pragma unroll
    for (int i = 0; i < TERMS; i++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const Four some = x.at[group][first + i];
#pragma unroll
            for (int r = 4 * group; r < HALF && r < 4 * group + 4; r++)
#pragma unroll
                for (int c = 0; c < 4; c++) found[r].at[c] = fmaf(weights[i].at[c], some.at[r % 4], found[r].at[c]);
        }
#pragma unroll
    for (int r = 0; r < HALF; r++) sums[r * apart] = found[r];
}

// Is there a sample at this place of a half, of `rows` in all?
__device__ __forceinline__ bool there(int place, int half, int rows) {
    return place < HALF && half * HALF + place < rows;
}

// Of a program, where so many are to go.
__device__ __forceinline__ int rows_of(long long left) { return left < ROWS ? (int)left : ROWS; }

__device__ __forceinline__ void swap(float& a, float& b) {
    const float kept = a;
    a = b;
    b = kept;
}

// -- forward ----------------------------------------------------------------------------------------------------------

struct ForwardRoom {
    States<SLICES * TERMS> states[2];
    Four sums[2][SLICES][HALF][H];  // of a unit's four gates
    Four bias[H];
    float inputs[2][4][THREADS];
};

// (i, f, g, o) = z[t] + bias + w h; c' = s(f) c + s(i) tanh(g); h' = s(o) tanh(c')
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(
    const float* z, const float* h0, const float* c0, const float* w, const float* bias, float* hs, float* cs, float* gates,
    long long steps, long long samples, long long z_n, long long z_t, long long z_b, long long w_n, long long bias_n
) {
    ForwardRoom& here = *(ForwardRoom*)room;
    const int me = threadIdx.x, slice = me / H, unit = me % H;  // of the product; of cells: sample and unit
    const long long client = blockIdx.x, size = samples * H, first = blockIdx.y * ROWS;
    const int rows = rows_of(samples - first);
    const long long at = (client * steps * samples + first + slice) * H + unit;
    w += client * w_n;
    z += client * z_n + (first + slice) * z_b + unit;
    hs += at;
    cs += at;
    gates += 4 * at - 3 * unit;

    Four weights[TERMS];
#pragma unroll
    for (int i = 0; i < TERMS; i++)
#pragma unroll
        for (int gate = 0; gate < 4; gate++) {
            const int k = slice * TERMS + i;
            weights[i].at[gate] = slice < SLICES && k < H ? w[(gate * H + unit) * H + k] : 0;
        }
    auto ask = [&](int half) {
        if (there(slice, half, rows))
#pragma unroll
            for (int gate = 0; gate < 4; gate++) fetch(&here.inputs[half][gate][me], z + gate * H);
        z += half ? z_t - HALF * z_b : HALF * z_b;
    };
    auto product = [&](int half) {
        if (slice < SLICES) multiply(weights, here.states[half], slice * TERMS, &here.sums[half][slice][0][unit], H);
    };
    ask(0);
    for (int k = me; k < 2 * GROUPS * SLICES * TERMS; k += THREADS) ((Four*)here.states)[k] = Four{};
    for (int k = me; k < 4 * H; k += THREADS) here.bias[k % H].at[k / H] = bias[client * bias_n + k];
    __syncthreads();
    float cells[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (there(slice, half, rows)) {
            const long long from = (client * samples + first + half * HALF + slice) * H + unit;
            cells[half] = c0[from];
            here.states[half].of(slice, unit) = h0[from];
        }
    __syncthreads();
    product(0);
    __syncthreads();

#pragma unroll 2
    for (int turn = 0; turn < 2 * steps; turn++) {
        const int half = turn & 1;
        fetched();
        if (turn + 1 < 2 * steps) ask(!half);
        if (there(slice, half, rows)) {
            Four sums = here.bias[unit];
#pragma unroll
            for (int gate = 0; gate < 4; gate++) sums.at[gate] += here.inputs[half][gate][me];
#pragma unroll
            for (int s = 0; s < SLICES; s++)
#pragma unroll
                for (int gate = 0; gate < 4; gate++) sums.at[gate] += here.sums[half][s][slice][unit].at[gate];
            const float i = sigmoid(sums.at[0]), f = sigmoid(sums.at[1]), g = tangent(sums.at[2]), o = sigmoid(sums.at[3]);
            const float c = f * cells[0] + i * g, h = o * tangent(c);
            cells[0] = c;
            here.states[half].of(slice, unit) = h;
            *hs = h;
            *cs = c;
            if (KEEP) {
                gates[0] = i;
                gates[H] = f;
                gates[2 * H] = g;
                gates[3 * H] = o;
            }
        }
        swap(cells[0], cells[1]);
        const long long on = half ? size - HALF * H : HALF * H;
        hs += on;
        cs += on;
        gates += 4 * on;
        product(!half);
        __syncthreads();
    }
}

// -- back through time ------------------------------------------------------------------------------------------------

struct BackwardRoom {
    States<4 * SLICES * TERMS> slopes[2];
    Four sums[2][4 * SLICES][HALF][H / 4];
    float inputs[2][7][THREADS];  // gates, the cell that the step was given, gradients to h and c
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
    const int place = me / H, unit = me % H;                                  // of cells: sample and unit
    const long long client = blockIdx.x, size = samples * H, first = blockIdx.y * ROWS;
    const int rows = rows_of(samples - first);
    const long long start = (client * samples + first + place) * H + unit;
    const long long at = ((client * steps + steps - 1) * samples + first + place) * H + unit;
    w += client * w_n;
    c0 += start;
    dh0 += start;
    dc0 += start;
    cs += at;
    gates += 4 * at - 3 * unit;
    dz += 4 * at - 3 * unit;
    dhs += client * dh_n + (steps - 1) * dh_t + (first + place) * dh_b + unit;
    dcs += client * dc_n + (steps - 1) * dc_t + (first + place) * dc_b + unit;
    db += 4 * H * (client * gridDim.y + blockIdx.y);

    Four weights[TERMS];
#pragma unroll
    for (int i = 0; i < TERMS; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int k = slice * TERMS + i;
            weights[i].at[c] = slice < 4 * SLICES && k < 4 * H ? w[k * H + 4 * column + c] : 0;
        }
    float late[2] = {}, cells[2];  // gradients to cells from later steps; cells after the step
    Four totals = {};              // of gradients to gates
#pragma unroll
    for (int half = 0; half < 2; half++)
        if (there(place, half, rows)) cells[half] = cs[half * HALF * H];
    auto ask = [&](int turn) {
        const int half = turn & 1;
        const float* before = turn / 2 + 1 < steps ? cs - size : c0 + half * HALF * H;
        if (there(place, half, rows)) {
            auto* to = here.inputs[half];
#pragma unroll
            for (int gate = 0; gate < 4; gate++) fetch(&to[gate][me], gates + gate * H);
            fetch(&to[4][me], before);
            fetch(&to[5][me], dhs);
            fetch(&to[6][me], dcs);
        }
        const long long on = half ? -HALF * H - size : HALF * H;
        gates += 4 * on;
        cs += on;
        dhs += half ? -HALF * dh_b - dh_t : HALF * dh_b;
        dcs += half ? -HALF * dc_b - dc_t : HALF * dc_b;
    };
    auto product = [&](int half) {
        if (slice < 4 * SLICES)
            multiply(weights, here.slopes[half], slice * TERMS, &here.sums[half][slice][0][column], H / 4);
    };
    ask(0);
    for (int k = me; k < 2 * GROUPS * 4 * SLICES * TERMS; k += THREADS) ((Four*)here.slopes)[k] = Four{};
    __syncthreads();
    product(0);
    __syncthreads();

#pragma unroll 2
    for (int turn = 0; turn < 2 * steps + 2; turn++) {
        const int half = turn & 1;
        fetched();
        if (turn + 1 < 2 * steps) ask(turn + 1);
        if (there(place, half, rows)) {
            float carried = 0;
#pragma unroll
            for (int s = 0; s < 4 * SLICES; s++) carried += here.sums[half][s][place][unit / 4].at[unit % 4];
            if (turn < 2 * steps) {
                auto* given = here.inputs[half];
                const float i = given[0][me], f = given[1][me], g = given[2][me], o = given[3][me], before = given[4][me];
                const float dh = given[5][me] + carried, out = tangent(cells[0]);
                const float dc = given[6][me] + late[0] + dh * o * (1 - out * out);
                const float to[4] = {dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g), dh * out * o * (1 - o)};
                late[0] = dc * f;
                cells[0] = before;
#pragma unroll
                for (int gate = 0; gate < 4; gate++) {
                    here.slopes[half].of(place, gate * H + unit) = to[gate];
                    dz[gate * H] = to[gate];
                    totals.at[gate] += to[gate];
                }
            } else {
                dh0[half * HALF * H] = carried;
                dc0[half * HALF * H] = late[0];
            }
        }
        swap(late[0], late[1]);
        swap(cells[0], cells[1]);
        dz += 4 * (half ? -HALF * H - size : HALF * H);
        product(!half);
        __syncthreads();
    }

    Four* parts = here.sums[0][0][0];
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
