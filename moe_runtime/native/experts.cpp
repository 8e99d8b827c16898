// Experts in bfloat16 with float32 sums: gather, gate and up, activation, down. See moe_runtime/experts/cpu_native.py.
//
// A product is of rows of tokens with rows of a matrix, both stored along the sum, so a result is one dot product: one Sum that
// runs from the first value to the last. What a row gives does not depend on the rows beside it.

#include <algorithm>
#include <atomic>

#include <omp.h>

#include "activation.h"
#include "vectors.h"

namespace {

constexpr int COLUMNS = 4;  // Matrix rows multiplied at once.
#ifdef __AVX512F__
constexpr int ROWS = 6;  // Token rows multiplied at once: 24 sums of the 32 registers.
#else
constexpr int ROWS = 2;  // 8 sums of 16.
#endif
constexpr int64_t LINE = 64 / sizeof(bf16);
constexpr int64_t STREAM_AHEAD = 1024;    // Values between what is multiplied and what is fetched then.
constexpr int64_t TILE_ROWS = 3 * ROWS;   // Token rows that stay in the first cache while a matrix goes by.
constexpr int64_t MAX_BLOCK = 64;         // Matrix rows of one task, at most.
constexpr int64_t BLOCK_VALUES = 65536;   // Values of one matrix in one task, about: 128 KiB.

// What to fetch into the cache while multiplying: `lines` cache lines a step from `from` on.
struct Fetch {
    const bf16 *from;
    int64_t lines;
};

// out[r][c] = x[r] . w[c] for R token rows and COLUMNS matrix rows of `depth` values.
template <int R>
void multiply_tile(const bf16 *const *x, const bf16 *w, int64_t depth, Fetch fetch, float *out) {
    Sum sums[R][COLUMNS] = {};
    int64_t k = 0;
    for (; k + STEP <= depth; k += STEP) {
        if (k % LINE == 0)
            for (int64_t i = 0; i < fetch.lines; i++, fetch.from += LINE) __builtin_prefetch(fetch.from);
        Packed values[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) values[c] = load(w + c * depth + k);
        for (int r = 0; r < R; r++) {
            Packed row = load(x[r] + k);
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = add_products(sums[r][c], values[c], row);
        }
    }
    if (k < depth) {
        Packed values[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) values[c] = load_first(w + c * depth + k, depth - k);
        for (int r = 0; r < R; r++) {
            Packed row = load_first(x[r] + k, depth - k);
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = add_products(sums[r][c], values[c], row);
        }
    }
    for (int r = 0; r < R; r++) reduce4(sums[r], out + r * MAX_BLOCK);
}

// The same by one matrix row after another: memory is read in one stream, which is faster for one or two token rows.
template <int R>
void multiply_stream(const bf16 *const *x, const bf16 *w, int64_t depth, float *out) {
    Sum sums[R][COLUMNS] = {};
    for (int c = 0; c < COLUMNS; c++, w += depth) {
        int64_t k = 0;
        for (; k + STEP <= depth; k += STEP) {
            __builtin_prefetch(w + k + STREAM_AHEAD);
            Packed values = load(w + k);
            for (int r = 0; r < R; r++) sums[r][c] = add_products(sums[r][c], values, load(x[r] + k));
        }
        if (k < depth) {
            Packed values = load_first(w + k, depth - k);
            for (int r = 0; r < R; r++)
                sums[r][c] = add_products(sums[r][c], values, load_first(x[r] + k, depth - k));
        }
    }
    for (int r = 0; r < R; r++) reduce4(sums[r], out + r * MAX_BLOCK);
}

// The tile for 1 to ROWS rows.
void multiply_rows(int64_t rows, const bf16 *const *x, const bf16 *w, int64_t depth, Fetch fetch, float *out) {
    switch (rows) {
        case 1: return multiply_tile<1>(x, w, depth, fetch, out);
        case 2: return multiply_tile<2>(x, w, depth, fetch, out);
#ifdef __AVX512F__
        case 3: return multiply_tile<3>(x, w, depth, fetch, out);
        case 4: return multiply_tile<4>(x, w, depth, fetch, out);
        case 5: return multiply_tile<5>(x, w, depth, fetch, out);
        case 6: return multiply_tile<6>(x, w, depth, fetch, out);
#endif
    }
}

// COLUMNS matrix rows with all token rows, in groups of ROWS. fetch: the matrix is in memory, not in a cache.
void multiply_columns(int64_t rows, const bf16 *const *x, const bf16 *w, int64_t depth, bool fetch, float *out) {
    if (fetch && rows == 1) return multiply_stream<1>(x, w, depth, out);
    if (fetch && rows == 2) return multiply_stream<2>(x, w, depth, out);
    int64_t groups = (rows + ROWS - 1) / ROWS;
    for (int64_t g = 0, first = 0; g < groups; g++, first += ROWS) {
        // The groups share the fetching of the matrix rows that follow, so that memory is never idle.
        int64_t lines = COLUMNS * g / groups, lines_end = fetch ? COLUMNS * (g + 1) / groups : lines;
        Fetch next = {w + (COLUMNS + lines) * depth, lines_end - lines};
        multiply_rows(std::min<int64_t>(ROWS, rows - first), x + first, w, depth, next, out + first * MAX_BLOCK);
    }
}

// The last columns, fewer than COLUMNS, by the same sums.
void multiply_last(int64_t rows, const bf16 *const *x, const bf16 *w, int64_t depth, int64_t columns, float *out) {
    for (int64_t r = 0; r < rows; r++) {
        Sum sums[COLUMNS] = {};
        float found[COLUMNS];
        for (int64_t k = 0; k < depth; k += STEP) {
            int64_t count = depth - k;
            Packed row = count < STEP ? load_first(x[r] + k, count) : load(x[r] + k);
            for (int64_t c = 0; c < columns; c++) {
                const bf16 *from = w + c * depth + k;
                sums[c] = add_products(sums[c], count < STEP ? load_first(from, count) : load(from), row);
            }
        }
        reduce4(sums, found);
        for (int64_t c = 0; c < columns; c++) out[r * MAX_BLOCK + c] = found[c];
    }
}

// out[r][c] = x[r] . w[c] + bias[c], rows of out MAX_BLOCK apart; rows <= TILE_ROWS, columns <= MAX_BLOCK. bias may be null.
void multiply(
    int64_t rows, const bf16 *const *x, const bf16 *w, int64_t depth, int64_t columns, const bf16 *bias, bool fetch,
    float *out) {
    int64_t c = 0;
    for (; c + COLUMNS <= columns; c += COLUMNS) multiply_columns(rows, x, w + c * depth, depth, fetch, out + c);
    if (c < columns) multiply_last(rows, x, w + c * depth, depth, columns - c, out + c);
    if (bias)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < columns; i++) out[r * MAX_BLOCK + i] += widen(bias[i]);
}

}  // namespace

// One call. Matrices of a slot lie one after another, rows without gaps. Biases may be null. Sizes in elements.
struct ExpertsCall {
    const bf16 *tokens;            // num_tokens rows, token_stride apart
    const int64_t *row_index;      // num_rows: the token row of each expert row
    const int64_t *rows_of_slot;   // num_slots, sums to num_rows
    const bf16 *gate_up;           // [num_slots, 2 inner, hidden]
    const bf16 *down;              // [num_slots, hidden, inner]
    const bf16 *gate_up_bias;      // [num_slots, 2 inner]
    const bf16 *down_bias;         // [num_slots, hidden]
    bf16 *inner_rows;              // [num_rows, inner], written
    bf16 *out;                     // [num_rows, hidden], written
    int64_t num_tokens, token_stride, num_rows, num_slots, hidden, inner;
    int64_t max_rows;              // Slots with more rows are left out.
    float limit;                   // Infinity: none.
    int32_t activation, num_threads;
};

namespace {

struct Work {
    int64_t slot, first_row, num_rows;
};

// The columns of a task: enough for a long read, few enough that all threads have some.
int64_t block_of(int64_t columns, int64_t depth, int64_t num_work, int64_t num_threads) {
    int64_t block = std::min(MAX_BLOCK, std::max<int64_t>(16, BLOCK_VALUES / std::max<int64_t>(1, depth)));
    while (block > 16 && num_work * (columns / block) < 4 * num_threads) block /= 2;
    return block / COLUMNS * COLUMNS;
}

void gate_up_task(const ExpertsCall &call, const Work &work, int64_t column, int64_t columns) {
    alignas(64) float gate[TILE_ROWS * MAX_BLOCK], up[TILE_ROWS * MAX_BLOCK];
    const bf16 *gates = call.gate_up + (2 * work.slot * call.inner + column) * call.hidden;
    const bf16 *ups = gates + call.inner * call.hidden;
    const bf16 *bias = call.gate_up_bias ? call.gate_up_bias + 2 * work.slot * call.inner + column : nullptr;
    for (int64_t done = 0; done < work.num_rows; done += TILE_ROWS) {
        int64_t rows = std::min(TILE_ROWS, work.num_rows - done), first = work.first_row + done;
        const bf16 *x[TILE_ROWS];
        for (int64_t r = 0; r < rows; r++) x[r] = call.tokens + call.row_index[first + r] * call.token_stride;
        multiply(rows, x, gates, call.hidden, columns, bias, done == 0, gate);
        multiply(rows, x, ups, call.hidden, columns, bias ? bias + call.inner : nullptr, done == 0, up);
        for (int64_t r = 0; r < rows; r++)
            apply(Activation(call.activation), gate + r * MAX_BLOCK, up + r * MAX_BLOCK, call.limit,
                  call.inner_rows + (first + r) * call.inner + column, columns);
    }
}

void down_task(const ExpertsCall &call, const Work &work, int64_t column, int64_t columns) {
    alignas(64) float found[TILE_ROWS * MAX_BLOCK];
    const bf16 *w = call.down + (work.slot * call.hidden + column) * call.inner;
    const bf16 *bias = call.down_bias ? call.down_bias + work.slot * call.hidden + column : nullptr;
    for (int64_t done = 0; done < work.num_rows; done += TILE_ROWS) {
        int64_t rows = std::min(TILE_ROWS, work.num_rows - done), first = work.first_row + done;
        const bf16 *x[TILE_ROWS];
        for (int64_t r = 0; r < rows; r++) x[r] = call.inner_rows + (first + r) * call.inner;
        multiply(rows, x, w, call.inner, columns, bias, done == 0, found);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++)
                call.out[(first + r) * call.hidden + column + c] = narrow(found[r * MAX_BLOCK + c]);
    }
}

// Tasks (work, block of columns) in order; each thread takes the next one when it is ready.
template <typename Task>
void take_tasks(std::atomic<int64_t> &next, const ExpertsCall &call, const Work *works, int64_t num_work,
                int64_t columns, int64_t block, Task task) {
    int64_t blocks = (columns + block - 1) / block;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_work * blocks;) {
        int64_t column = i % blocks * block;
        task(call, works[i / blocks], column, std::min(block, columns - column));
    }
}

}  // namespace

// `works` is room for num_slots. Returns the number of slots left out, -1 if row_index leads outside the tokens, -2 if the
// slots' rows are not num_rows.
extern "C" int64_t moe_runtime_experts(const ExpertsCall *given, Work *works) {
    const ExpertsCall &call = *given;
    for (int64_t i = 0; i < call.num_rows; i++)
        if (call.row_index[i] < 0 || call.row_index[i] >= call.num_tokens) return -1;
    int64_t row = 0, num_work = 0, left_out = 0;
    for (int64_t slot = 0; slot < call.num_slots; slot++) {
        int64_t rows = call.rows_of_slot[slot];
        if (rows < 0 || rows > call.num_rows - row) return -2;
        if (rows > call.max_rows) left_out++;
        else if (rows) works[num_work++] = {slot, row, rows};
        row += rows;
    }
    if (row != call.num_rows) return -2;
    if (!num_work) return left_out;
    std::atomic<int64_t> next_up{0}, next_down{0};
    int64_t up_block = block_of(call.inner, call.hidden, num_work, call.num_threads);
    int64_t down_block = block_of(call.hidden, call.inner, num_work, call.num_threads);
#pragma omp parallel num_threads(call.num_threads)
    {
        take_tasks(next_up, call, works, num_work, call.inner, up_block, gate_up_task);
#pragma omp barrier
        take_tasks(next_down, call, works, num_work, call.hidden, down_block, down_task);
    }
    return left_out;
}
