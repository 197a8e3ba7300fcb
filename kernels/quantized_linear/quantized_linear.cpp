// y[t, n] = sum over k of x[t, k] * w[n, k], then + bias[n]; x and y float, w quantized (quantized.h).
//
// Order: w[n, k] is formed in float, by one fused multiply-add or one product; then every y[t, n] is one chain of fused
// multiply-adds, k = 0, 1, ..., K-1, in one vector lane, from 0. So the bits are those of linear.cpp on the same
// weights written out as floats, whatever the rows, tiles and threads.
//
// Tiling: a register tile is up to WIDE_ROWS rows x one panel, which keeps enough chains going for a single row, or up
// to TALL_ROWS rows x half a panel; it unpacks codes in registers. Where a chunk has many tiles, a stretch of the panel
// is written out once as floats in the first-level cache for all of them, and the sums wait in memory in between.
#include "quantized.h"

namespace {

#if defined(__AVX512F__)
constexpr int WIDE_ROWS = 4, TALL_ROWS = 12;  // 16 and 24 accumulators of 32 registers
#else
constexpr int WIDE_ROWS = 2, TALL_ROWS = 4;  // 8 accumulators of 16 registers
#endif
constexpr int64_t WRITE_OUT_TILES = 3;  // from so many tiles on, writing weights out beforehand pays

// A stretch that is written out has the form of a panel as well.
struct WrittenOut {
    static constexpr int AT_ONCE = 1;
    static constexpr int64_t HEAD_BYTES = 0, LINE_BYTES = PANEL * 4;
    static constexpr int64_t group_bytes(int64_t group) { return group * LINE_BYTES; }

    template <int P>
    struct Group {
        int first;
        Group(const uint8_t*, int first) : first(first) {}
        vf weight(const uint8_t* line, int, int i) const { return load((const float*)line + (first + i) * W); }
    };
};

// Carries sums [R][PANEL] over `count` more k's, in the parts [first, first + P). x: R rows that lie `stride` apart.
template <int R, int P, class F>
void tile(const float* x, int64_t stride, const uint8_t* block, int64_t group, int64_t count, int first, float* kept) {
    vf sums[R][P];
    for (int r = 0; r < R; ++r) {
        for (int part = 0; part < P; ++part) sums[r][part] = load(kept + r * PANEL + (first + part) * W);
    }
    for (int64_t start = 0; start < count; start += group) {
        const typename F::template Group<P> scaled(block, first);
        const uint8_t* line = block + F::HEAD_BYTES;
        for (int64_t i = start; i < start + group; i += F::AT_ONCE) {
#pragma GCC unroll 2
            for (int step = 0; step < F::AT_ONCE; ++step) {
                vf weights[P];
                for (int part = 0; part < P; ++part) weights[part] = scaled.weight(line, step, part);
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    const vf a = splat(x[r * stride + i + step]);
                    for (int part = 0; part < P; ++part) sums[r][part] = fma(a, weights[part], sums[r][part]);
                }
            }
            line += F::LINE_BYTES;
        }
        block += F::group_bytes(group);
    }
    for (int r = 0; r < R; ++r) {
        for (int part = 0; part < P; ++part) store(kept + r * PANEL + (first + part) * W, sums[r][part]);
    }
}

template <int R, int P, class F>
void tile_of(int rows, const float* x, int64_t stride, const uint8_t* block, int64_t group, int64_t count,
             float* kept) {
    if constexpr (R > 1) {
        if (rows < R) return tile_of<R - 1, P, F>(rows, x, stride, block, group, count, kept);
    }
#pragma GCC unroll 2
    for (int first = 0; first < PARTS; first += P) tile<R, P, F>(x, stride, block, group, count, first, kept);
}

// Carries the sums of `rows` rows over `count` more k's, in register tiles of nearly equal height.
template <class F>
void tiles(int64_t rows, const float* x, int64_t stride, const uint8_t* block, int64_t group, int64_t count,
           float* kept) {
    if (rows <= WIDE_ROWS) return tile_of<WIDE_ROWS, PARTS, F>(rows, x, stride, block, group, count, kept);
    const int64_t tiles = (rows + TALL_ROWS - 1) / TALL_ROWS;
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t top = rows * i / tiles, bottom = rows * (i + 1) / tiles;
        tile_of<TALL_ROWS, PARTS / 2, F>(bottom - top, x + top * stride, stride, block, group, count,
                                         kept + top * PANEL);
    }
}

// `count` k's of a panel as floats, k-major.
template <class F>
void write_out(const uint8_t* block, int64_t group, int64_t count, float* out) {
    for (int64_t start = 0; start < count; start += group) {
        const typename F::template Group<PARTS> scaled(block, 0);
        const uint8_t* line = block + F::HEAD_BYTES;
        for (int64_t i = 0; i < group; i += F::AT_ONCE) {
#pragma GCC unroll 2
            for (int step = 0; step < F::AT_ONCE; ++step) {
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; ++part) {
                    store(out, scaled.weight(line, step, part));
                    out += W;
                }
            }
            line += F::LINE_BYTES;
        }
        block += F::group_bytes(group);
    }
}

template <class F>
void rows_by_panel(const Problem& p, int64_t first, int64_t rows, const uint8_t* panel, float* weights, float* sums) {
    const float* x = p.x + first * p.k;
    if (rows <= (WRITE_OUT_TILES - 1) * TALL_ROWS) return tiles<F>(rows, x, p.k, panel, p.group, p.k, sums);
    for (int64_t start = 0; start < p.k; start += STRETCH) {
        const int64_t count = p.k - start < STRETCH ? p.k - start : STRETCH;
        write_out<F>(panel + start / p.group * F::group_bytes(p.group), p.group, count, weights);
        tiles<WrittenOut>(rows, x + start, p.k, (const uint8_t*)weights, count, count, sums);
    }
}

}  // namespace

extern "C" {

void moorage_quantized_linear(const float* x, const uint8_t* packed, const float* bias, float* y, int64_t t, int64_t n,
                              int64_t k, int64_t group, int bits, int scale_bytes, int minimum, int threads) {
    const Problem problem{x, packed, bias, y, t, n, k, group};
    with_form(bits, scale_bytes, minimum, [&](auto form) {
        using F = decltype(form);
        for_each_panel<F>(problem, STRETCH * PANEL, threads, rows_by_panel<F>);
    });
}
}
