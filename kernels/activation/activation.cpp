// y[t, i] = act(x[t, i]) * x[t, n + i]: the gated activations, gate first.
//
// Order: no sum over elements. A lane's arithmetic is the same in a whole vector and in the rest at a row's end.
#include "simd.h"

namespace {

// a / (1 + exp(-a)), by way of exp(-|a|), which cannot overflow.
inline vf silu(vf a) {
    vf e = exp_nonpositive(-absolute(a));
    return a * (a < vf{} ? e : splat(1.0f)) / (1.0f + e);
}

// 0.5 a (1 + tanh(u)), u = sqrt(2 / pi) (a + 0.044715 a^3). With e = exp(-2 |u|), 0.5 (1 + tanh(u)) is
// 1 / (1 + e) for u >= 0 and e / (1 + e) below: silu's form, with 2u in the exponent.
inline vf gelu_tanh(vf a) {
    vf u = 0.7978845608f * a * fma(a * a, splat(0.044715f), splat(1.0f));
    vf e = exp_nonpositive(-2.0f * absolute(u));
    return a * (u < vf{} ? e : splat(1.0f)) / (1.0f + e);
}

template <class Act>
void gated(const float* x, float* y, int64_t tokens, int64_t n, int threads, Act act) {
    const int64_t whole = n / W * W, rest = n - whole;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        const float *gate = x + t * 2 * n, *up = gate + n;
        float* out = y + t * n;
        for (int64_t i = 0; i < whole; i += W) store(out + i, act(load(gate + i)) * load(up + i));
        if (rest) store_part(out + whole, act(load_part(gate + whole, rest)) * load_part(up + whole, rest), rest);
    }
}

}  // namespace

extern "C" {

void moorage_gated_silu(const float* x, float* y, int64_t tokens, int64_t n, int threads) {
    gated(x, y, tokens, n, threads, [](vf a) { return silu(a); });
}

void moorage_gated_gelu_tanh(const float* x, float* y, int64_t tokens, int64_t n, int threads) {
    gated(x, y, tokens, n, threads, [](vf a) { return gelu_tanh(a); });
}
}
