// The product of quantized_linear.cpp with the dot products of bfloat16 that some processors have: x is rounded to
// bfloat16, codes fit in it as they are, sums are float.
//
// Order: inside a group of k the instruction adds x[k] * code[k] and x[k+1] * code[k+1] to one lane, pair after pair,
// from 0. Groups follow each other: y = y + scale * sum in one rounding, then, where there are minimums,
// y = y + minimum * (sum of the group's x) in one. That sum adds the vectors of the group lane by lane, then the lanes
// as a balanced tree. Nothing but an element's own row and column takes part, whatever the rows, tiles and threads.
//
// Tiling: a register tile is up to ROWS rows x one panel. Codes become pairs in registers, for every tile anew: that is
// cheaper than to keep them. The (chunk of rows, panel) pairs are dealt to threads in contiguous runs.
#include "quantized.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

namespace {

constexpr int ROWS = 6;  // 24 accumulators of 32 registers

// The activations: bfloat16 [t, k], and the sums of each group, [t, k / group].
struct Rounded {
    std::vector<bf16> x;
    std::vector<float> sums;
};

Rounded rounded(const Problem& p, bool with_sums, int threads) {
    const int64_t groups = p.k / p.group;
    Rounded out{std::vector<bf16>(p.t * p.k), std::vector<float>(with_sums ? p.t * groups : 0)};
#pragma omp parallel for num_threads(threads) schedule(static) if (p.t > 32)
    for (int64_t r = 0; r < p.t; ++r) {
        for (int64_t g = 0; g < groups; ++g) {
            vf sum{};
            for (int64_t i = g * p.group; i < (g + 1) * p.group; i += W) {
                bf16* x = &out.x[r * p.k + i];
                store(x, load(p.x + r * p.k + i));
                sum = sum + load(x);
            }
            if (with_sums) out.sums[r * groups + g] = sum_lanes(sum)[0];
        }
    }
    return out;
}

template <class F>
constexpr int64_t PAIR_BYTES = 2 / F::AT_ONCE * F::LINE_BYTES;  // of two k's

// bfloat16 of every code of 4 bits, twice: the look-up takes five bits of an index.
template <bool SIGNED>
inline __m512i table() {
    alignas(64) static constexpr bf16 low[8] = {0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    alignas(64) static constexpr bf16 above[8] = {0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
    alignas(64) static constexpr bf16 below[8] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
    const __m128i first = _mm_load_si128((const __m128i*)low);
    const __m128i second = _mm_load_si128((const __m128i*)(SIGNED ? below : above));
    return _mm512_broadcast_i64x4(_mm256_set_m128i(second, first));
}

// Codes of two k's in one part, as bfloat16: the first k in the lower halves.
template <class F>
inline vu code_pair(const uint8_t* line, int part) {
    vu words;
    memcpy(&words, line, sizeof words);
    if constexpr (F::BITS == 4) {
        return (vu)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)words, 4 * part), table<F::SIGNED>());
    } else {
        vu next;
        memcpy(&next, line + F::LINE_BYTES, sizeof next);
        return (vu)F::decode(words, part) >> 16 | ((vu)F::decode(next, part) & 0xffff0000);
    }
}

// Carries kept [R][PANEL] over all of K. top: the first of the R rows.
template <int R, class F>
void tile(const Problem& p, const Rounded& in, int64_t top, const uint8_t* block, float* kept) {
    const int64_t groups = p.k / p.group;
    for (int64_t g = 0; g < groups; ++g) {
        vf sums[R][PARTS] = {};
        const bf16* x = &in.x[top * p.k + g * p.group];
        const uint8_t* line = block + F::HEAD_BYTES;
        for (int64_t i = 0; i < p.group; i += 2) {
            vu codes[PARTS];
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; ++part) codes[part] = code_pair<F>(line, part);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                uint32_t pair;
                memcpy(&pair, x + r * p.k + i, sizeof pair);
                const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; ++part) {
                    sums[r][part] = (vf)_mm512_dpbf16_ps((__m512)sums[r][part], a, (__m512bh)codes[part]);
                }
            }
            line += PAIR_BYTES<F>;
        }
        const typename F::template Group<PARTS> scaled(block, 0);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; ++part) {
                float* y = kept + r * PANEL + part * W;
                vf sum = fma(scaled.scales[part], sums[r][part], load(y));
                if (F::MINIMUM) sum = fma(scaled.minimums[part], splat(in.sums[(top + r) * groups + g]), sum);
                store(y, sum);
            }
        }
        block += F::group_bytes(p.group);
    }
}

template <int R, class F>
void tile_of(int rows, const Problem& p, const Rounded& in, int64_t top, const uint8_t* panel, float* kept) {
    if constexpr (R > 1) {
        if (rows < R) return tile_of<R - 1, F>(rows, p, in, top, panel, kept);
    }
    tile<R, F>(p, in, top, panel, kept);
}

// Register tiles of nearly equal height over `rows` rows from `first` on.
template <class F>
void rows_by_panel(const Problem& p, const Rounded& in, int64_t first, int64_t rows, const uint8_t* panel,
                   float* sums) {
    const int64_t tiles = (rows + ROWS - 1) / ROWS;
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t top = rows * i / tiles, bottom = rows * (i + 1) / tiles;
        tile_of<ROWS, F>(bottom - top, p, in, first + top, panel, sums + top * PANEL);
    }
}

}  // namespace

extern "C" {

int moorage_has_bf16_dots() { return 1; }

void moorage_quantized_dots(const float* x, const uint8_t* packed, const float* bias, float* y, int64_t t, int64_t n,
                            int64_t k, int64_t group, int bits, int scale_bytes, int minimum, int threads) {
    const Problem problem{x, packed, bias, y, t, n, k, group};
    const Rounded in = rounded(problem, minimum, threads);
    with_form(bits, scale_bytes, minimum, [&](auto form) {
        using F = decltype(form);
        for_each_panel<F>(problem, 0, threads,
                          [&](const Problem& p, int64_t first, int64_t rows, const uint8_t* panel, float*,
                              float* sums) { rows_by_panel<F>(p, in, first, rows, panel, sums); });
    });
}
}

#else

extern "C" {

int moorage_has_bf16_dots() { return 0; }

void moorage_quantized_dots(const float*, const uint8_t*, const float*, float*, int64_t, int64_t, int64_t, int64_t, int,
                            int, int, int) {}
}

#endif
