// y = x / sqrt(mean(x^2) + eps) * weight over vectors of length n, given as `outer` x `inner` vectors.
//
// Order: lane l adds the squares of elements l, l + W, l + 2W, ... as one chain of fused multiply-adds; the rest that
// does not fill a vector joins with zeros in the other lanes; the lanes are added as a balanced tree. Nothing
// but n takes part. Tiling: one vector at a time, vectors dealt to threads in contiguous runs.
#include <cmath>

#include "simd.h"

extern "C" void moorage_rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, float* y,
                                 int64_t outer, int64_t inner, int64_t n, int threads) {
    const int64_t whole = n / W * W, rest = n - whole;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t v = 0; v < outer * inner; ++v) {
        const float* in = x + v / inner * x_stride + v % inner * n;
        float* out = y + v * n;
        vf squares = {};
        for (int64_t i = 0; i < whole; i += W) {
            vf a = load(in + i);
            squares = fma(a, a, squares);
        }
        if (rest) {
            vf a = load_part(in + whole, rest);
            squares = fma(a, a, squares);
        }
        const vf factor = splat(1.0f / sqrtf(sum_lanes(squares)[0] / n + eps));
        for (int64_t i = 0; i < whole; i += W) store(out + i, load(in + i) * factor * load(weight + i));
        if (rest) {
            vf scaled = load_part(in + whole, rest) * factor * load_part(weight + whole, rest);
            store_part(out + whole, scaled, rest);
        }
    }
}
