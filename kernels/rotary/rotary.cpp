// Turns the pairs (x[i], x[i + half]) of every head by the angle of token and frequency, in place.
//
// Order: no sum over elements; each output is one multiply and one fused multiply-add. Tokens are dealt to threads.
#include "simd.h"

extern "C" void moorage_rotary(float* x, int64_t x_stride, const float* cosines, const float* sines, int64_t tokens,
                               int64_t heads, int64_t half, int threads) {
    const int64_t whole = half / W * W, rest = half - whole;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        const float *cosine = cosines + t * half, *sine = sines + t * half;
        for (int64_t h = 0; h < heads; ++h) {
            float *low = x + t * x_stride + h * 2 * half, *high = low + half;
            for (int64_t i = 0; i < whole; i += W) {
                vf a = load(low + i), b = load(high + i), c = load(cosine + i), s = load(sine + i);
                store(low + i, fma(a, c, -(b * s)));
                store(high + i, fma(b, c, a * s));
            }
            if (rest) {
                vf a = load_part(low + whole, rest), b = load_part(high + whole, rest);
                vf c = load_part(cosine + whole, rest), s = load_part(sine + whole, rest);
                store_part(low + whole, fma(a, c, -(b * s)), rest);
                store_part(high + whole, fma(b, c, a * s), rest);
            }
        }
    }
}
