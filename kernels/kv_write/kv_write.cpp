// cache[slots[t]] = rows[t] for keys and values, rounded to nearest even where the cache is bf16.
//
// Order: no sum. Slots differ, so threads never meet; tokens are dealt to them in contiguous runs.
#include "simd.h"

namespace {

template <class Cache>
void copy_row(const float* in, Cache* out, int64_t n) {
    const int64_t whole = n / W * W, rest = n - whole;
    for (int64_t i = 0; i < whole; i += W) store(out + i, load(in + i));
    if (rest) store_part(out + whole, load_part(in + whole, rest), rest);
}

template <class Cache>
void kv_write(const float* k, int64_t k_stride, const float* v, int64_t v_stride, Cache* keys, Cache* values,
              const int64_t* slots, int64_t tokens, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
        copy_row(k + t * k_stride, keys + slots[t] * n, n);
        copy_row(v + t * v_stride, values + slots[t] * n, n);
    }
}

}  // namespace

extern "C" {

void moorage_kv_write_f32(const float* k, int64_t k_stride, const float* v, int64_t v_stride, float* keys,
                          float* values, const int64_t* slots, int64_t tokens, int64_t n, int threads) {
    kv_write(k, k_stride, v, v_stride, keys, values, slots, tokens, n, threads);
}

void moorage_kv_write_bf16(const float* k, int64_t k_stride, const float* v, int64_t v_stride, bf16* keys,
                           bf16* values, const int64_t* slots, int64_t tokens, int64_t n, int threads) {
    kv_write(k, k_stride, v, v_stride, keys, values, slots, tokens, n, threads);
}
}
