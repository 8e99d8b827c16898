// Products with one matrix, and root-mean-square norms, with float32 sums. See moe_runtime/layers/cpu_native.py.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include <omp.h>

#include "lanes.h"
#include "products.h"

// out = x w^T + bias. Sizes in elements.
struct LinearCall {
    const bf16 *x;       // rows of depth values, x_stride apart
    const void *w;       // [columns, depth]: int8 if there are scales, else bf16
    const float *scales; // [columns], or null
    const bf16 *bias;    // [columns], or null
    bf16 *out;           // [rows, columns]
    int64_t rows, x_stride, depth, columns;
    int32_t num_threads;
};

// sum = x + delta, out = the norm of sum; without delta, of x. Rows are [outer, inner], each of size values.
struct NormCall {
    const bf16 *x;       // Rows at outer_stride and inner_stride
    const bf16 *delta;   // As out; null: none
    const bf16 *weight;  // [size]
    bf16 *sum;           // As out; written if there is a delta
    bf16 *out;           // [outer, inner, size]
    int64_t outer, inner, outer_stride, inner_stride, size;
    float eps;
    int32_t num_threads;
};

namespace {

constexpr int64_t VALUES_PER_THREAD = 16384;  // Of a norm; with fewer, another thread takes longer to come than to do it.

template <typename W>
void linear_rows(const LinearCall &call, int64_t column, int64_t columns, const Rows<W> &w) {
    alignas(64) float found[TILE_ROWS * MAX_BLOCK];
    for (int64_t done = 0; done < call.rows; done += TILE_ROWS) {
        int64_t rows = std::min(TILE_ROWS, call.rows - done);
        const bf16 *x[TILE_ROWS];
        for (int64_t r = 0; r < rows; r++) x[r] = call.x + (done + r) * call.x_stride;
        multiply(rows, x, w, columns, call.bias ? call.bias + column : nullptr, done == 0, found);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++)
                call.out[(done + r) * call.columns + column + c] = narrow(found[r * MAX_BLOCK + c]);
    }
}

template <typename W>
void linear_block(const LinearCall &call, int64_t column, int64_t columns) {
    Rows<W> w = {(const W *)call.w + column * call.depth, call.depth, call.scales, 1, call.scales ? 1 : 0, column};
    if (sizeof(W) == sizeof(bf16) || call.rows <= TILE_ROWS) return linear_rows(call, column, columns, w);
    static thread_local Panel values;
    linear_rows(call, column, columns, widened(w, columns, values));
}

template <typename W>
void linear(const LinearCall &call) {
    int64_t block = block_of(call.columns, call.depth * sizeof(W), 1, call.num_threads);
    int64_t blocks = (call.columns + block - 1) / block;
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(std::max<int64_t>(1, std::min<int64_t>(call.num_threads, blocks)))
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < blocks;)
        linear_block<W>(call, i * block, std::min(block, call.columns - i * block));
}

// Partial sums of WIDTH values each, so that the order does not depend on the CPU.
float mean_square(const bf16 *x, int64_t size) {
    float lanes[WIDTH] = {};
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH)
        for (int64_t j = 0; j < WIDTH; j++) lanes[j] += widen(x[i + j]) * widen(x[i + j]);
    for (int64_t j = 0; i + j < size; j++) lanes[j] += widen(x[i + j]) * widen(x[i + j]);
    return total(lanes, WIDTH) / size;
}

void norm_row(const NormCall &call, int64_t row) {
    const bf16 *x = call.x + row / call.inner * call.outer_stride + row % call.inner * call.inner_stride;
    if (call.delta) {
        const bf16 *delta = call.delta + row * call.size;
        bf16 *sum = call.sum + row * call.size;
        for (int64_t i = 0; i < call.size; i++) sum[i] = narrow(widen(x[i]) + widen(delta[i]));
        x = sum;
    }
    float scale = 1.0f / std::sqrt(mean_square(x, call.size) + call.eps);
    bf16 *out = call.out + row * call.size;
    for (int64_t i = 0; i < call.size; i++)
        out[i] = narrow(widen(narrow(widen(x[i]) * scale)) * widen(call.weight[i]));
}

}  // namespace

extern "C" int64_t moe_runtime_linear(const LinearCall *given) {
    given->scales ? linear<int8>(*given) : linear<bf16>(*given);
    return 0;
}

extern "C" int64_t moe_runtime_norm(const NormCall *given) {
    const NormCall &call = *given;
    int64_t rows = call.outer * call.inner, useful = 1 + rows * call.size / VALUES_PER_THREAD;
#pragma omp parallel for num_threads(std::min<int64_t>(call.num_threads, useful))
    for (int64_t row = 0; row < rows; row++) norm_row(call, row);
    return 0;
}
