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
