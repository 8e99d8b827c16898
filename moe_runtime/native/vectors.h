// bfloat16 vectors and float32 sums, as wide as the instruction set that this is compiled for has them.
//
// Packed: STEP consecutive bfloat16 values. Sum: float32 partial sums of a dot product. load(from) reads STEP values, of bfloat16,
// FP8 or int8; load_first(from, count) the first count < STEP, then zeros.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef uint16_t bf16;  // The bits.
typedef int8_t int8;
typedef uint8_t fp8;    // The bits of a float8 e4m3 without infinities (e4m3fn). NaN is not kept: loading refuses it.

static inline float widen(bf16 value) {
    uint32_t bits = uint32_t(value) << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// To the nearest, ties to even; NaN stays NaN.
static inline bf16 narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return bf16((bits & 0x7FFFFFFF) > 0x7F800000 ? (bits >> 16) | 0x40 : rounded);
}

// Exact. A normal e4m3 has its exponent and mantissa in the places of bfloat16's lowest, 120 less in the exponent's bias; of the
// subnormal, m * 2^-9, there are eight.
static inline bf16 to_bf16(fp8 value) {
    uint32_t magnitude = value & 0x7F, bits;
    float small = float(magnitude) * 0x1p-9f;
    memcpy(&bits, &small, sizeof bits);
    return bf16((magnitude < 8 ? bits >> 16 : (magnitude << 4) + 0x3C00) | (uint32_t(value) & 0x80) << 8);
}

// Exact: bfloat16 has eight bits of precision.
static inline bf16 to_bf16(int8 value) {
    float wide = value;
    uint32_t bits;
    memcpy(&bits, &wide, sizeof bits);
    return bf16(bits >> 16);
}

#ifdef __AVX512F__

// The same for 32 int8: float32, of which the upper halves are kept.
static inline __m512i widen_int8(const int8 *from) {
    static const uint16_t UPPER[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                       33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from + 1)));
    return _mm512_permutex2var_epi16(_mm512_castps_si512(low), _mm512_loadu_si512(UPPER), _mm512_castps_si512(high));
}

// The same for 32 FP8.
static inline __m512i widen_fp8(__m256i values) {
    static const uint16_t SMALL[32] = {0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60};
    __m512i wide = _mm512_cvtepi8_epi16(values);
    __m512i magnitude = _mm512_and_si512(wide, _mm512_set1_epi16(0x7F));
    __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(0x3C00));
    __mmask32 small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
    __m512i found = _mm512_mask_permutexvar_epi16(normal, small, magnitude, _mm512_loadu_si512(SMALL));
    return _mm512_or_si512(found, _mm512_and_si512(wide, _mm512_set1_epi16(int16_t(0x8000))));
}

#endif

#ifdef __AVX512BF16__

typedef __m512bh Packed;
typedef __m512 Sum;
constexpr int64_t STEP = 32;

static inline Packed load(const bf16 *from) { return (Packed)_mm512_loadu_si512(from); }

static inline Packed load_first(const bf16 *from, int64_t count) {
    return (Packed)_mm512_maskz_loadu_epi16((__mmask32(1) << count) - 1, from);
}

static inline Sum add_products(Sum sum, Packed a, Packed b) { return _mm512_dpbf16_ps(sum, a, b); }

#else

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

typedef uint32_t Packed __attribute__((vector_size(BYTES)));
typedef float Sum __attribute__((vector_size(BYTES)));
constexpr int64_t STEP = BYTES / 2;

static inline Packed load(const bf16 *from) {
    Packed packed;
    memcpy(&packed, from, sizeof packed);
    return packed;
}

// A 32-bit lane holds two values: the upper one is a float32 once the lower is cleared, the lower once it is moved up.
static inline Sum add_products(Sum sum, Packed a, Packed b) {
    sum += (Sum)(a << 16) * (Sum)(b << 16);
    return sum + (Sum)(a & 0xFFFF0000u) * (Sum)(b & 0xFFFF0000u);
}

#endif

#ifdef __AVX512F__

static inline Packed load(const fp8 *from) {
    return (Packed)widen_fp8(_mm256_loadu_si256((const __m256i *)from));
}

static inline Packed load(const int8 *from) { return (Packed)widen_int8(from); }

#else

template <typename W>
static inline Packed load(const W *from) {
    bf16 values[STEP];
    for (int64_t i = 0; i < STEP; i++) values[i] = to_bf16(from[i]);
    return load(values);
}

#endif

template <typename W>
static inline Packed load_first(const W *from, int64_t count) {
    W values[STEP] = {};
    memcpy(values, from, count * sizeof(W));
    return load(values);
}

constexpr int64_t WIDEN_AHEAD = 4096;  // Bytes between what is widened and what is fetched then: a panel comes from memory.

// So many values in bfloat16.
template <typename W>
static inline void widen_all(const W *from, int64_t count, bf16 *to) {
    int64_t i = 0;
    for (; i + STEP <= count; i += STEP) {
        __builtin_prefetch((const char *)(from + i) + WIDEN_AHEAD);
        Packed values = load(from + i);
        memcpy(to + i, &values, sizeof values);
    }
    for (; i < count; i++) to[i] = to_bf16(from[i]);
}

// out[i] = the sum over the lanes of sums[i], for 4 of them.
#ifdef __AVX512F__

// Partial sums of each, one for each 128 bits.
static inline __m512 reduce_to_four(const Sum *sums) {
    __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]), _mm512_unpackhi_ps(sums[0], sums[1]));
    __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]), _mm512_unpackhi_ps(sums[2], sums[3]));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b));
    return _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
}

// Of two vectors, the sum of the first and second 128 bits and that of the third and fourth.
static inline __m512 add_neighbours(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
}

static inline void reduce4(const Sum *sums, float *out) {
    __m512 two = add_neighbours(reduce_to_four(sums), __m512{});
    _mm_storeu_ps(out, _mm512_castps512_ps128(add_neighbours(two, two)));
}

// The same for 4 rows of 4 sums, with results `distance` apart.
static inline void reduce16(const Sum (*sums)[4], float *out, int64_t distance) {
    __m512 first = add_neighbours(reduce_to_four(sums[0]), reduce_to_four(sums[1]));
    __m512 second = add_neighbours(reduce_to_four(sums[2]), reduce_to_four(sums[3]));
    __m512 found = add_neighbours(first, second);
    _mm_storeu_ps(out, _mm512_castps512_ps128(found));
    _mm_storeu_ps(out + distance, _mm512_extractf32x4_ps(found, 1));
    _mm_storeu_ps(out + 2 * distance, _mm512_extractf32x4_ps(found, 2));
    _mm_storeu_ps(out + 3 * distance, _mm512_extractf32x4_ps(found, 3));
}

#else

static inline void reduce4(const Sum *sums, float *out) {
    for (int i = 0; i < 4; i++) {
        float lanes[BYTES / 4];
        memcpy(lanes, &sums[i], sizeof lanes);
        for (int width = BYTES / 8; width; width /= 2)
            for (int j = 0; j < width; j++) lanes[j] += lanes[j + width];
        out[i] = lanes[0];
    }
}

static inline void reduce16(const Sum (*sums)[4], float *out, int64_t distance) {
    for (int r = 0; r < 4; r++) reduce4(sums[r], out + r * distance);
}

#endif

// The same for R rows.
template <int R>
static inline void reduce_rows(const Sum (*sums)[4], float *out, int64_t distance) {
    int r = 0;
    for (; r + 4 <= R; r += 4) reduce16(sums + r, out + r * distance, distance);
    for (; r < R; r++) reduce4(sums[r], out + r * distance);
}
