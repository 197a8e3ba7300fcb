// Vectors of float of the machine's width, on top of the vector extensions that gcc and clang share.
//
// The order of every sum in this library is written out in its source. The library is built with
// -ffp-contract=off, so a multiply and an add become one rounding only where fma() says so.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vu16 __attribute__((vector_size(W * 2)));

typedef uint16_t bf16;  // the upper half of a float

// IEEE's float of 16 bits.
struct half {
    uint16_t bits;
};

static inline vf splat(float a) {
#if defined(__AVX512F__)
    return (vf)_mm512_set1_ps(a);
#elif defined(__AVX2__)
    return (vf)_mm256_set1_ps(a);
#else
    return vf{a, a, a, a};
#endif
}

static inline vi splat_int(int32_t a) { return vi{} + a; }

// a * b + c in every lane: with one rounding where the processor has an instruction for it, else with two, which is
// fifteen times faster than to imitate one.
static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline vf load(const float* p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

static inline vf load(const bf16* p) {
    vu16 h;
    memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}

// Exact. The exponent is moved up by a product, which makes normal numbers of subnormal ones as well.
static inline vf load(const half* p) {
    vu16 bits;
    memcpy(&bits, p, sizeof bits);
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__AVX2__) && defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)bits);
#else
    vu wide = __builtin_convertvector(bits, vu);
    vf magnitude = (vf)((wide & 0x7fff) << 13) * splat(0x1p112f);
    vu special = (vu)((wide & 0x7c00) == 0x7c00) & 0x7f800000;  // infinity and NaN
    return (vf)((vu)magnitude | special | (wide & 0x8000) << 16);
#endif
}

// Rounds to nearest even, as torch does; NaN stays NaN.
static inline void store(bf16* p, vf v) {
    vu u = (vu)v;
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    rounded = v == v ? rounded : vu{} + 0x7fc0;
    vu16 h = __builtin_convertvector(rounded, vu16);
    memcpy(p, &h, sizeof h);
}

// The first n < W elements; the other lanes are zero, respectively left alone in memory.
template <class T>
static inline vf load_part(const T* p, int64_t n) {
    T buffer[W] = {};
    memcpy(buffer, p, n * sizeof(T));
    return load(buffer);
}

template <class T>
static inline void store_part(T* p, vf v, int64_t n) {
    T buffer[W];
    store(buffer, v);
    memcpy(p, buffer, n * sizeof(T));
}

static inline float as_float(float a) { return a; }
static inline float as_float(half a) { return load_part(&a, 1)[0]; }

static inline vf larger(vf a, vf b) { return a > b ? a : b; }
static inline vf absolute(vf a) { return (vf)((vu)a & 0x7fffffff); }

// Lane i of the result is lane index[i] of a, or lane index[i] - W of b.
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

typedef std::make_integer_sequence<int, W> Lanes;

template <int DISTANCE, int... I>
static inline vf exchange(vf v, std::integer_sequence<int, I...>) {
    return SHUFFLE(v, v, (I ^ DISTANCE)...);
}

// Every lane gets the sum of all, as a balanced tree: lane i with lane i + W/2, then i + W/4, ...
template <int DISTANCE = W / 2>
static inline vf sum_lanes(vf v) {
    v = v + exchange<DISTANCE>(v, Lanes{});
    if constexpr (DISTANCE > 1) v = sum_lanes<DISTANCE / 2>(v);
    return v;
}

template <int DISTANCE = W / 2>
static inline vf max_lanes(vf v) {
    v = larger(v, exchange<DISTANCE>(v, Lanes{}));
    if constexpr (DISTANCE > 1) v = max_lanes<DISTANCE / 2>(v);
    return v;
}

// exp(x) for x <= 0, within 2 ulp; exactly 1 at 0, 0 below -87 (where float would lose its normal range), NaN at NaN.
static inline vf exp_nonpositive(vf x) {
    const vf shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    vi tiny = x < splat(-87.0f);
    vf clamped = tiny ? splat(-87.0f) : x;
    vf shifted = fma(clamped, splat(1.44269504088896341f), shifter);
    vf n = shifted - shifter;
    vf r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
    vf result = (vf)((vi)p + ((vi)shifted << 23));  // times 2^n
    result = tiny ? vf{} : result;
    return x == x ? result : x;
}

// a[0] b[0] a[1] b[1] ...: the lower half of the interleaved lanes with PART 0, the upper half with PART 1.
template <int PART, int... I>
static inline vf interleave(vf a, vf b, std::integer_sequence<int, I...>) {
    return SHUFFLE(a, b, (PART * W / 2 + I / 2 + I % 2 * W)...);
}

// Reads the W x W words of `rows` as a matrix and transposes it in place.
// One round interleaves the first and the second half of the matrix, which rotates the bits of an element's
// index (row, column) by one; after log2(W) rounds row and column have changed places.
static inline void transpose(vf rows[W]) {
    for (int round = 1; round < W; round *= 2) {
        vf next[W];
        for (int i = 0; i < W / 2; ++i) {
            next[2 * i] = interleave<0>(rows[i], rows[i + W / 2], Lanes{});
            next[2 * i + 1] = interleave<1>(rows[i], rows[i + W / 2], Lanes{});
        }
        for (int i = 0; i < W; ++i) rows[i] = next[i];
    }
}
