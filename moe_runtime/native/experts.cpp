// Experts with float32 sums: gather, gate and up, activation, down. See moe_runtime/experts/cpu_native.py.

#include <algorithm>
#include <atomic>
#include <vector>

#include <omp.h>

#include "activation.h"
#include "int4.h"

// How the values of a matrix are scaled: scales[part][row / rows_per_scale][group], float32. Of int4, see Rows<int4>.
struct Scales {
    const float *values;  // Null: not at all. Of the first slot; slots lie one after another.
    int64_t rows_per_scale, rows, groups;
    int64_t group, zero_points, short_scales;  // Of int4.
};

// One call. Matrices of a slot lie one after another, rows without gaps. Biases may be null. Sizes in elements.
struct ExpertsCall {
    const bf16 *tokens;            // num_tokens rows, token_stride apart
    const int64_t *row_index;      // num_rows: the token row of each expert row
    const int64_t *rows_of_slot;   // num_slots, sums to num_rows
    const void *gate_up;           // [num_slots, 2 inner, hidden], of `format`
    const void *down;              // [num_slots, hidden, inner]
    const bf16 *gate_up_bias;      // [num_slots, 2 inner]
    const bf16 *down_bias;         // [num_slots, hidden]
    bf16 *inner_rows;              // [num_rows, inner], written
    bf16 *out;                     // [num_rows, hidden], written
    int64_t num_tokens, token_stride, num_rows, num_slots, hidden, inner;
    int64_t max_rows;              // Slots with more rows are left out.
    float limit;                   // Infinity: none.
    int32_t activation, num_threads, format;
    Scales gate_up_scales, down_scales;  // Of one part of gate_up: gate, then up.
};

namespace {

struct Work {
    int64_t slot, first_row, num_rows;
};

// Rows from `row` on of the matrix number `matrix`, of num_rows rows.
template <typename W>
Rows<W> rows_of(const void *matrices, const Scales &scales, int64_t matrix, int64_t num_rows, int64_t depth, int64_t row) {
    if constexpr (std::is_same_v<W, int4>) {
        Rows<int4> first = {(const int4 *)matrices, depth, (const char *)scales.values, scales.short_scales != 0,
                            scales.zero_points != 0, scales.groups, scales.group};
        return first.from(matrix * num_rows + row);
    } else {
        const float *own = scales.values ? scales.values + matrix * scales.rows * scales.groups : nullptr;
        const W *values = (const W *)matrices + (matrix * num_rows + row) * depth;
        return {values, depth, own, scales.rows_per_scale, scales.groups, row};
    }
}

template <typename W>
void gate_up_rows(const ExpertsCall &call, const Work &work, int64_t column, int64_t columns, const Rows<W> &gates,
                  const Rows<W> &ups) {
    alignas(64) float gate[TILE_ROWS * MAX_BLOCK], up[TILE_ROWS * MAX_BLOCK];
    const bf16 *bias = call.gate_up_bias ? call.gate_up_bias + 2 * work.slot * call.inner + column : nullptr;
    for (int64_t done = 0; done < work.num_rows; done += TILE_ROWS) {
        int64_t rows = std::min(TILE_ROWS, work.num_rows - done), first = work.first_row + done;
        const bf16 *x[TILE_ROWS];
        for (int64_t r = 0; r < rows; r++) x[r] = call.tokens + call.row_index[first + r] * call.token_stride;
        multiply(rows, x, gates, columns, bias, done == 0, gate);
        multiply(rows, x, ups, columns, bias ? bias + call.inner : nullptr, done == 0, up);
        for (int64_t r = 0; r < rows; r++)
            apply(Activation(call.activation), gate + r * MAX_BLOCK, up + r * MAX_BLOCK, call.limit,
                  call.inner_rows + (first + r) * call.inner + column, columns);
    }
}

template <typename W>
void gate_up_task(const ExpertsCall &call, const Work &work, int64_t column, int64_t columns) {
    Rows<W> gates = rows_of<W>(call.gate_up, call.gate_up_scales, 2 * work.slot, call.inner, call.hidden, column);
    Rows<W> ups = rows_of<W>(call.gate_up, call.gate_up_scales, 2 * work.slot + 1, call.inner, call.hidden, column);
    if (sizeof(W) == sizeof(bf16) || work.num_rows <= TILE_ROWS)
        return gate_up_rows(call, work, column, columns, gates, ups);
    static thread_local Panel gate_values, up_values;
    gate_up_rows(call, work, column, columns, widened(gates, columns, gate_values), widened(ups, columns, up_values));
}

template <typename W>
void down_rows(const ExpertsCall &call, const Work &work, int64_t column, int64_t columns, const Rows<W> &w) {
    alignas(64) float found[TILE_ROWS * MAX_BLOCK];
    const bf16 *bias = call.down_bias ? call.down_bias + work.slot * call.hidden + column : nullptr;
    for (int64_t done = 0; done < work.num_rows; done += TILE_ROWS) {
        int64_t rows = std::min(TILE_ROWS, work.num_rows - done), first = work.first_row + done;
        const bf16 *x[TILE_ROWS];
        for (int64_t r = 0; r < rows; r++) x[r] = call.inner_rows + (first + r) * call.inner;
        multiply(rows, x, w, columns, bias, done == 0, found);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++)
                call.out[(first + r) * call.hidden + column + c] = narrow(found[r * MAX_BLOCK + c]);
    }
}

template <typename W>
void down_task(const ExpertsCall &call, const Work &work, int64_t column, int64_t columns) {
    Rows<W> w = rows_of<W>(call.down, call.down_scales, work.slot, call.hidden, call.inner, column);
    if (sizeof(W) == sizeof(bf16) || work.num_rows <= TILE_ROWS) return down_rows(call, work, column, columns, w);
    static thread_local Panel values;
    down_rows(call, work, column, columns, widened(w, columns, values));
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

template <typename W>
void compute(const ExpertsCall &call, const Work *works, int64_t num_work) {
    std::atomic<int64_t> next_up{0}, next_down{0};
    int64_t up_block = block_of(call.inner, row_bytes<W>(call.hidden), num_work, call.num_threads);
    int64_t down_block = block_of(call.hidden, row_bytes<W>(call.inner), num_work, call.num_threads);
#pragma omp parallel num_threads(call.num_threads)
    {
        take_tasks(next_up, call, works, num_work, call.inner, up_block, gate_up_task<W>);
#pragma omp barrier
        take_tasks(next_down, call, works, num_work, call.hidden, down_block, down_task<W>);
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
    switch (Format(call.format)) {
        case BF16: compute<bf16>(call, works, num_work); break;
        case FP8: compute<fp8>(call, works, num_work); break;
        case INT8: compute<int8>(call, works, num_work); break;
        case INT4: compute<int4>(call, works, num_work); break;
    }
    return left_out;
}
