// Products of token rows with the rows of a matrix, both stored along the sum, so a result is one dot product: one Sum that runs from
// the first value to the last, or, where scales change along it, one for each group. What a token row gives does not depend on
// the rows beside it, but for scales that change along a row, which many rows have applied before (see experts.cpp).
#pragma once

#include <algorithm>
#include <vector>

#include "lanes.h"

constexpr int COLUMNS = 4;        // Matrix rows multiplied at once.
constexpr int64_t GROUP = 128;    // Values along a matrix row that share a scale, where scales change along it.
constexpr int64_t AHEAD = 2048;   // Bytes between what is multiplied and what is fetched then.
constexpr int64_t MAX_BLOCK = 64; // Matrix rows of one task, at most; the distance of rows of results.
constexpr int64_t BLOCK_BYTES = 131072;  // Of one matrix in one task, about.
#ifdef __AVX512F__
constexpr int ROWS = 6;           // Token rows multiplied at once: 24 sums of the 32 registers.
constexpr int64_t TILE_ROWS = 12; // Token rows that stay in the first cache while a matrix goes by; more lie in the same sets too often.
#else
constexpr int ROWS = 2;           // 8 sums of 16.
constexpr int64_t TILE_ROWS = 6;
#endif

// Types of the values of a matrix.
enum Format { BF16, FP8, INT8, INT4 };

// Rows of a matrix, one after another, of bf16, fp8 or int8 values. A value stands for itself times a scale.
template <typename W>
struct Rows {
    const W *values;
    int64_t depth;            // Of a row.
    const float *scales;      // Null: none.
    int64_t rows_per_scale;
    int64_t groups;           // Scales along a row.
    int64_t first;            // Number of the first row, in the matrix whose first scale is scales[0].

    Rows from(int64_t row) const { return {values + row * depth, depth, scales, rows_per_scale, groups, first + row}; }
    // Without a division where it is one for each row: it is asked for as often as there are results of a task.
    const float *scales_of(int64_t row) const {
        return scales + (rows_per_scale == 1 ? first + row : (first + row) / rows_per_scale) * groups;
    }
};

// What to fetch into the cache while multiplying: `lines` cache lines for each that is read, from `from` on.
struct Fetch {
    const char *from;
    int64_t lines;
};

// out[r][c] = x[r] . w[c] for R token rows and COLUMNS matrix rows. GROUPED: scales change along the rows, and are applied here;
// they are the same for all of these matrix rows, which are not on both sides of a multiple of GROUP.
template <int R, bool GROUPED, typename W>
static void multiply_tile(
    const bf16 *const *x, const Rows<W> &w, const float *scales, Fetch fetch,
    float *out) {
    constexpr int64_t LINE = 64 / sizeof(W);
    Sum totals[R][COLUMNS] = {};
    int64_t k = 0;
    for (int64_t group = 0; k < w.depth; group++) {
        Sum sums[R][COLUMNS] = {};
        int64_t end = GROUPED ? std::min(w.depth, k + GROUP) : w.depth;
        for (; k + STEP <= end; k += STEP) {
            if (k % LINE == 0)
                for (int64_t i = 0; i < fetch.lines; i++, fetch.from += 64) __builtin_prefetch(fetch.from);
            Packed values[COLUMNS];
            for (int c = 0; c < COLUMNS; c++) values[c] = load(w.values + c * w.depth + k);
            for (int r = 0; r < R; r++) {
                Packed row = load(x[r] + k);
                for (int c = 0; c < COLUMNS; c++) sums[r][c] = add_products(sums[r][c], values[c], row);
            }
        }
        if (k < end) {
            Packed values[COLUMNS];
            for (int c = 0; c < COLUMNS; c++) values[c] = load_first(w.values + c * w.depth + k, end - k);
            for (int r = 0; r < R; r++) {
                Packed row = load_first(x[r] + k, end - k);
                for (int c = 0; c < COLUMNS; c++) sums[r][c] = add_products(sums[r][c], values[c], row);
            }
            k = end;
        }
        float scale = GROUPED ? scales[group] : 1.0f;
        for (int c = 0; c < COLUMNS; c++)
            for (int r = 0; r < R; r++) totals[r][c] = GROUPED ? totals[r][c] + sums[r][c] * scale : sums[r][c];
    }
    reduce_rows<R>(totals, out, MAX_BLOCK);
}

// The same by one matrix row after another, `columns` <= COLUMNS of them: memory is read in one stream, which is faster for one or
// two token rows.
template <int R, bool GROUPED, typename W>
static void multiply_stream(const bf16 *const *x, const Rows<W> &w, int64_t columns, float *out) {
    Sum sums[R][COLUMNS] = {};
    for (int64_t c = 0; c < columns; c++) {
        const W *values = w.values + c * w.depth;
        const float *scales = GROUPED ? w.scales_of(c) : nullptr;
        Sum total[R] = {}, sum[R] = {};
        for (int64_t k = 0; k < w.depth; k += STEP) {
            if (GROUPED && k % GROUP == 0 && k)
                for (int r = 0; r < R; r++) total[r] += sum[r] * scales[k / GROUP - 1], sum[r] = Sum{};
            int64_t left = w.depth - k;
            __builtin_prefetch((const char *)(values + k) + AHEAD);
            Packed packed = left < STEP ? load_first(values + k, left) : load(values + k);
            for (int r = 0; r < R; r++)
                sum[r] = add_products(sum[r], packed, left < STEP ? load_first(x[r] + k, left) : load(x[r] + k));
        }
        for (int r = 0; r < R; r++) sums[r][c] = GROUPED ? total[r] + sum[r] * scales[w.groups - 1] : sum[r];
    }
    for (int r = 0; r < R; r++) {
        float found[COLUMNS];
        reduce4(sums[r], found);
        for (int64_t c = 0; c < columns; c++) out[r * MAX_BLOCK + c] = found[c];
    }
}

// The tile for 1 to ROWS rows; grouped sums take twice the registers, so half as many rows.
template <bool GROUPED, typename W>
static void multiply_rows(
    int64_t rows, const bf16 *const *x, const Rows<W> &w, const float *scales, Fetch fetch,
    float *out) {
    switch (rows) {
        case 1: return multiply_tile<1, GROUPED>(x, w, scales, fetch, out);
#ifdef __AVX512F__
        case 2: return multiply_tile<2, GROUPED>(x, w, scales, fetch, out);
        case 3: return multiply_tile<3, GROUPED>(x, w, scales, fetch, out);
#endif
    }
    if constexpr (!GROUPED) switch (rows) {
#ifdef __AVX512F__
        case 4: return multiply_tile<4, GROUPED>(x, w, scales, fetch, out);
        case 5: return multiply_tile<5, GROUPED>(x, w, scales, fetch, out);
        case 6: return multiply_tile<6, GROUPED>(x, w, scales, fetch, out);
#else
        case 2: return multiply_tile<2, GROUPED>(x, w, scales, fetch, out);
#endif
    }
}

// COLUMNS matrix rows with all token rows, in groups. fetch: the matrix is in memory, not in a cache.
template <bool GROUPED, typename W>
static void multiply_columns(int64_t rows, const bf16 *const *x, const Rows<W> &w, bool fetch, float *out) {
    if (fetch && rows == 1) return multiply_stream<1, GROUPED>(x, w, COLUMNS, out);
    if (fetch && rows == 2) return multiply_stream<2, GROUPED>(x, w, COLUMNS, out);
    constexpr int64_t AT_ONCE = GROUPED ? ROWS / 2 : ROWS;
    const float *scales = GROUPED ? w.scales_of(0) : nullptr;
    int64_t groups = (rows + AT_ONCE - 1) / AT_ONCE;
    for (int64_t g = 0, first = 0; g < groups; g++, first += AT_ONCE) {
        // The groups share the fetching of the matrix rows that follow, so that memory is never idle.
        int64_t lines = COLUMNS * g / groups, lines_end = fetch ? COLUMNS * (g + 1) / groups : lines;
        Fetch next = {(const char *)w.from(COLUMNS + lines).values, lines_end - lines};
        multiply_rows<GROUPED>(std::min(AT_ONCE, rows - first), x + first, w, scales, next, out + first * MAX_BLOCK);
    }
}

template <bool GROUPED, typename W>
static void multiply_block(int64_t rows, const bf16 *const *x, const Rows<W> &w, int64_t columns, bool fetch, float *out) {
    int64_t c = 0;
    for (; c + COLUMNS <= columns; c += COLUMNS) multiply_columns<GROUPED>(rows, x, w.from(c), fetch, out + c);
    for (int64_t r = 0; c < columns && r < rows; r++)
        multiply_stream<1, GROUPED>(x + r, w.from(c), columns - c, out + r * MAX_BLOCK + c);
}

// out[r][c] = x[r] . w[c] + bias[c], rows of out MAX_BLOCK apart; rows <= TILE_ROWS, columns <= MAX_BLOCK. bias may be null.
template <typename W>
static void multiply(
    int64_t rows, const bf16 *const *x, const Rows<W> &w, int64_t columns, const bf16 *bias, bool fetch, float *out) {
    bool grouped = w.scales && w.groups > 1;
    if (grouped) multiply_block<true>(rows, x, w, columns, fetch, out);
    else multiply_block<false>(rows, x, w, columns, fetch, out);
    if (!bias && (!w.scales || grouped)) return;
    float scales[MAX_BLOCK], shifts[MAX_BLOCK];
    for (int64_t c = 0; c < columns; c++) {
        scales[c] = w.scales && !grouped ? *w.scales_of(c) : 1.0f;
        shifts[c] = bias ? widen(bias[c]) : 0.0f;
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) out[r * MAX_BLOCK + c] = out[r * MAX_BLOCK + c] * scales[c] + shifts[c];
}

// Values in whole cache lines: a vector that lies across two takes two loads, which made products a few percent slower.
struct alignas(64) Line {
    bf16 values[32];
};
typedef std::vector<Line> Panel;

// Rows in bf16, for so many token rows that widening for each TILE_ROWS of them would take longer. Scales that change
// along a row are applied, and the products rounded; others stay scales.
template <typename W>
static Rows<bf16> widened(const Rows<W> &rows, int64_t columns, Panel &panel) {
    panel.resize((columns * rows.depth + 31) / 32);
    bf16 *values = panel.data()->values;
    widen_all(rows.values, columns * rows.depth, values);
    if (rows.groups <= 1) return {values, rows.depth, rows.scales, rows.rows_per_scale, rows.groups, rows.first};
    for (int64_t c = 0; c < columns; c++) {
        const float *scales = rows.scales_of(c);
        for (int64_t k = 0; k < rows.depth; k += GROUP)
            scale_all(values + c * rows.depth + k, std::min(GROUP, rows.depth - k), scales[k / GROUP]);
    }
    return {values, rows.depth, nullptr, 1, 0, rows.first};
}

static inline const Rows<bf16> &widened(const Rows<bf16> &rows, int64_t, Panel &) { return rows; }

// The columns of a task: enough for a long read, few enough that all threads have some.
static inline int64_t block_of(int64_t columns, int64_t row_bytes, int64_t num_work, int64_t num_threads) {
    int64_t block = std::min(MAX_BLOCK, std::max<int64_t>(16, BLOCK_BYTES / row_bytes));
    while (block > 16 && num_work * (columns / block) < 4 * num_threads) block /= 2;
    return block / COLUMNS * COLUMNS;
}
