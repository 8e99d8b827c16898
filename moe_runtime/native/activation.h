// The gated activations of moe_runtime.layers.activation, in float32: out = act(gate) * up.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "vectors.h"

enum Activation : int32_t { SILU, GELU, GELU_TANH, RELU, SWIGLU_OAI };

// e^x, relative error below 3e-7, in operations that the compiler makes vectors of: 2^n times a polynomial of the
// remainder (the coefficients of exp in Cephes' expf).
static inline float exp_of(float x) {
    x = x > 88.0f ? 88.0f : x < -87.0f ? -87.0f : x;
    float n = x * 1.44269504f;
    n = (n + 12582912.0f) - 12582912.0f;  // Rounded to the nearest integer.
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = (int32_t(n) + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }

template <Activation KIND>
static inline float activate(float gate, float up) {
    if (KIND == SILU) return gate * sigmoid(gate) * up;
    if (KIND == GELU) return 0.5f * gate * (1.0f + std::erf(gate * 0.70710678f)) * up;
    // 0.5 (1 + tanh(u)) = sigmoid(2u), here with u = sqrt(2/pi) (x + 0.044715 x^3).
    if (KIND == GELU_TANH) return gate * sigmoid(1.59576912f * (gate + 0.044715f * gate * gate * gate)) * up;
    if (KIND == RELU) return (gate < 0.0f ? 0.0f : gate) * up;
    return gate * sigmoid(1.702f * gate) * (up + 1.0f);
}

// count values; gate is cut above limit, up to [-limit, limit], before.
template <Activation KIND>
static void gated(const float *gate, const float *up, float limit, bf16 *out, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        float g = gate[i] > limit ? limit : gate[i];
        float u = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
        out[i] = narrow(activate<KIND>(g, u));
    }
}

static void apply(
    Activation kind, const float *gate, const float *up, float limit, bf16 *out, int64_t count) {
    switch (kind) {
        case SILU: return gated<SILU>(gate, up, limit, out, count);
        case GELU: return gated<GELU>(gate, up, limit, out, count);
        case GELU_TANH: return gated<GELU_TANH>(gate, up, limit, out, count);
        case RELU: return gated<RELU>(gate, up, limit, out, count);
        case SWIGLU_OAI: return gated<SWIGLU_OAI>(gate, up, limit, out, count);
    }
}
