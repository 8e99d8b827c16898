// Vectors of float32 (Sum of vectors.h) lane by lane, and reductions over arrays in a fixed order.
#pragma once

#include "vectors.h"

constexpr int64_t LANES = STEP / 2;  // Values of a Sum.
typedef uint32_t Words __attribute__((vector_size(sizeof(Sum))));

static inline Sum load_sum(const float *from) {
    Sum sum;
    memcpy(&sum, from, sizeof sum);
    return sum;
}

static inline void store(float *to, Sum sum) { memcpy(to, &sum, sizeof sum); }

// Values 0, 2, 4, ... and 1, 3, 5, ... of those in `values`.
static inline Sum even_values(Packed values) { return (Sum)((Words)values << 16); }
static inline Sum odd_values(Packed values) { return (Sum)((Words)values & 0xFFFF0000u); }

// What narrow does, in the upper half of each lane; not for NaN, whose bits may overflow.
static inline Words round_number(Sum values) { return (Words)values + 0x7FFFu + (((Words)values >> 16) & 1u); }

// values[i] *= scale, rounded to bfloat16.
static inline void scale_all(bf16 *values, int64_t count, float scale) {
    int64_t i = 0;
    for (; scale == scale && i + STEP <= count; i += STEP) {
        Packed packed = load(values + i);
        Words even = round_number(even_values(packed) * scale) >> 16;
        Words scaled = even | (round_number(odd_values(packed) * scale) & 0xFFFF0000u);
        memcpy(values + i, &scaled, sizeof scaled);
    }
    for (; i < count; i++) values[i] = narrow(widen(values[i]) * scale);
}

// Two bfloat16 values, as often as they fit.
static inline Packed repeat_pair(const bf16 *from) {
    uint32_t pair;
    memcpy(&pair, from, sizeof pair);
    return (Packed)(Words{} + pair);
}

constexpr int64_t WIDTH = 16;  // Partial results of a reduction: the same on all CPUs. Counts are multiples of it.

static inline float largest(const float *values, int64_t count) {
    float lanes[WIDTH];
    for (int64_t i = 0; i < WIDTH; i++) lanes[i] = values[i];
    for (int64_t c = WIDTH; c < count; c += WIDTH)
        for (int64_t i = 0; i < WIDTH; i++) lanes[i] = values[c + i] > lanes[i] ? values[c + i] : lanes[i];
    for (int64_t half = WIDTH / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
    return lanes[0];
}

static inline float total(const float *values, int64_t count) {
    float lanes[WIDTH] = {};
    for (int64_t c = 0; c < count; c += WIDTH)
        for (int64_t i = 0; i < WIDTH; i++) lanes[i] += values[c + i];
    for (int64_t half = WIDTH / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}
