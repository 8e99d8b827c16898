// Products with int4 matrices. Scales and zero points belong to groups within a row, so they are applied where values are widened to bfloat16, and
// everything behind that is the product of bfloat16 rows: what a token row gives is the same in all of its forms.
//
// Layout, scales and zero points: see moe_runtime/int4.py.
#pragma once

#include "products.h"

struct int4 { uint8_t pair; };

constexpr int64_t INT4_AHEAD = 4096;            // As AHEAD: a byte has twice as many values, so time is shorter.
constexpr int64_t HALF = 32, BLOCK = 2 * HALF;  // Values of a block are two halves: lower and upper halves of its 32 bytes.

static inline int64_t blocks_of(int64_t depth) { return (depth + BLOCK - 1) / BLOCK; }

// Bytes of a row of `depth` values.
template <typename W>
static inline int64_t row_bytes(int64_t depth) { return depth * sizeof(W); }
template <>
inline int64_t row_bytes<int4>(int64_t depth) { return blocks_of(depth) * HALF; }

template <>
struct Rows<int4> {
    const int4 *values;
    int64_t depth;            // Values of a row.
    const char *scales;       // Of the first row: `groups` scales, then as many zero points if there are any.
    bool short_scales;        // Both are bfloat16, not float32.
    bool zero_points;         // Else they are 8.
    int64_t groups, group;    // Groups of a row; values of a group, a multiple of HALF unless it is the whole row.

    int64_t scale_bytes() const { return groups * ((zero_points ? 2 : 1) * (short_scales ? 2 : 4)); }
    Rows from(int64_t row) const {
        Rows rows = *this;
        rows.values += row * row_bytes<int4>(depth);
        rows.scales += row * scale_bytes();
        return rows;
    }
};

static inline float widen(float value) { return value; }

// One of `groups` numbers for every half block of a row: each as often as a group has halves, the last one to the end.
template <typename T>
static inline void spread(const T *from, const Rows<int4> &w, float *to) {
    int64_t halves = 2 * blocks_of(w.depth), each = w.group / HALF;
    if (each == 1) {
        for (int64_t g = 0; g < w.groups; g++) to[g] = widen(from[g]);
        if (w.groups < halves) to[w.groups] = to[w.groups - 1];
        return;
    }
    for (int64_t g = 0, half = 0; g < w.groups; g++) {
        float value = widen(from[g]);
        for (int64_t end = g + 1 < w.groups ? half + each : halves; half < end; half++) to[half] = value;
    }
}

// The scale of every half block of the first row, then the zero points.
static inline void spread_scales(const Rows<int4> &w, float *scales) {
    int64_t halves = 2 * blocks_of(w.depth);
    for (int part = 0; part < (w.zero_points ? 2 : 1); part++) {
        if (w.short_scales) spread((const bf16 *)w.scales + part * w.groups, w, scales + part * halves);
        else spread((const float *)w.scales + part * w.groups, w, scales + part * halves);
    }
    if (!w.zero_points) std::fill(scales + halves, scales + 2 * halves, 8.0f);
}

#ifdef __AVX512F__

#ifdef __AVX512BF16__
static inline __m512i narrow_both(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
#else
static inline __m256i narrow_numbers(__m512 values) {
    __m512i bits = _mm512_castps_si512(values);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}
static inline __m512i narrow_both(__m512 low, __m512 high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(narrow_numbers(low)), narrow_numbers(high), 1);
}
#endif

// What each code stands for, for both halves of a block, and with that the block's values: a lookup for each half.
static inline void widen_block(const int4 *from, const float *scales, const float *zeros, Packed &low, Packed &high) {
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 first = _mm512_mul_ps(_mm512_sub_ps(codes, _mm512_set1_ps(zeros[0])), _mm512_set1_ps(scales[0]));
    __m512 second = _mm512_mul_ps(_mm512_sub_ps(codes, _mm512_set1_ps(zeros[1])), _mm512_set1_ps(scales[1]));
    __m512i table = narrow_both(first, second);
    __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)from));
    __m512i upper = _mm512_or_si512(_mm512_srli_epi16(pairs, 4), _mm512_set1_epi16(16));
    low = (Packed)_mm512_permutexvar_epi16(_mm512_and_si512(pairs, _mm512_set1_epi16(15)), table);
    high = (Packed)_mm512_permutexvar_epi16(upper, table);
}

static inline void widen_block(const int4 *from, const float *scales, const float *zeros, bf16 *to) {
    Packed low, high;
    widen_block(from, scales, zeros, low, high);
    memcpy(to, &low, sizeof low);
    memcpy(to + HALF, &high, sizeof high);
}

#else

static inline void widen_block(const int4 *from, const float *scales, const float *zeros, bf16 *to) {
    for (int64_t i = 0; i < HALF; i++) to[i] = narrow((float(from[i].pair & 15) - zeros[0]) * scales[0]);
    for (int64_t i = 0; i < HALF; i++) to[HALF + i] = narrow((float(from[i].pair >> 4) - zeros[1]) * scales[1]);
}

#endif

static float *room_for_scales(int64_t count) {
    static thread_local std::vector<float> scales;
    scales.resize(std::max<int64_t>(count, scales.size()));
    return scales.data();
}

// As of products.h. A row's surplus values land where the next row begins, and are overwritten by it.
static inline Rows<bf16> widened(const Rows<int4> &rows, int64_t columns, Panel &panel) {
    int64_t blocks = blocks_of(rows.depth);
    float *scales = room_for_scales(4 * blocks);
    panel.resize((columns * rows.depth + BLOCK + 31) / 32);
    bf16 *values = panel.data()->values, *to = values;
    for (int64_t c = 0; c < columns; c++, to += rows.depth) {
        Rows<int4> row = rows.from(c);
        spread_scales(row, scales);
        for (int64_t b = 0; b < blocks; b++)
            widen_block(row.values + b * HALF, scales + 2 * b, scales + 2 * (blocks + b), to + b * BLOCK);
    }
    return {values, rows.depth, nullptr, 1, 0, 0};
}

#ifdef __AVX512BF16__

// COLUMNS matrix rows from memory with R token rows, widened in registers, while the COLUMNS rows behind them are fetched.
template <int R>
static void multiply_int4(const bf16 *const *x, const Rows<int4> &w, float *out) {
    int64_t blocks = blocks_of(w.depth), bytes = row_bytes<int4>(w.depth);
    float *scales = room_for_scales(COLUMNS * 4 * blocks);
    for (int c = 0; c < COLUMNS; c++) spread_scales(w.from(c), scales + 4 * c * blocks);
    Sum sums[R][COLUMNS] = {};
    const char *next = (const char *)w.values + INT4_AHEAD, *next_scales = w.scales + 2 * COLUMNS * w.scale_bytes();
    for (int64_t i = 0; i < COLUMNS * w.scale_bytes(); i += 64) __builtin_prefetch(next_scales + i);
    for (int64_t b = 0; b < blocks; b++) {
        for (int64_t i = 0; i < COLUMNS * HALF; i += 64) __builtin_prefetch(next + b * COLUMNS * HALF + i);
        Packed low[R], high[R];
        int64_t left = w.depth - b * BLOCK;
        for (int r = 0; r < R; r++) {
            const bf16 *row = x[r] + b * BLOCK;
            low[r] = left < HALF ? load_first(row, left) : load(row);
            high[r] = left >= BLOCK ? load(row + HALF) : load_first(row + HALF, std::max<int64_t>(0, left - HALF));
        }
        for (int c = 0; c < COLUMNS; c++) {
            Packed first, second;
            const float *own = scales + 4 * c * blocks + 2 * b;
            widen_block(w.values + c * bytes + b * HALF, own, own + 2 * blocks, first, second);
            for (int r = 0; r < R; r++) sums[r][c] = add_products(sums[r][c], first, low[r]);
            for (int r = 0; r < R; r++) sums[r][c] = add_products(sums[r][c], second, high[r]);
        }
    }
    reduce_rows<R>(sums, out, MAX_BLOCK);
}

#endif

// As of products.h.
static void multiply(int64_t rows, const bf16 *const *x, const Rows<int4> &w, int64_t columns, const bf16 *bias, bool fetch, float *out) {
    static thread_local Panel values;
    int64_t c = 0;
    for (; c + COLUMNS <= columns; c += COLUMNS) {
#ifdef __AVX512BF16__
        if (rows == 1) { multiply_int4<1>(x, w.from(c), out + c); continue; }
        if (rows == 2) { multiply_int4<2>(x, w.from(c), out + c); continue; }
        if (rows == 3) { multiply_int4<3>(x, w.from(c), out + c); continue; }
        if (rows == 4) { multiply_int4<4>(x, w.from(c), out + c); continue; }
#endif
        Rows<bf16> wide = widened(w.from(c), COLUMNS, values);
        const char *next = (const char *)w.from(c + COLUMNS).values;
        for (int64_t first = 0; first < rows; first += ROWS) {
            // A line of the rows that follow for each of the widened rows that is read: all of them, at the end.
            Fetch ahead = {next, fetch && first == 0 ? 1 : 0};
            multiply_rows<false>(std::min<int64_t>(ROWS, rows - first), x + first, wide, nullptr, ahead, out + first * MAX_BLOCK + c);
        }
    }
    if (c < columns) {
        Rows<bf16> wide = widened(w.from(c), columns - c, values);
        for (int64_t r = 0; r < rows; r++)
            multiply_stream<1, false>(x + r, wide, columns - c, out + r * MAX_BLOCK + c);
    }
    for (c = 0; c < columns && bias; c++)
        for (int64_t r = 0; r < rows; r++) out[r * MAX_BLOCK + c] += widen(bias[c]);
}
