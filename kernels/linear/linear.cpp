// y[t, n] = sum over k of x[t, k] * w[n, k], then + bias[n]; x and y float, w float or bf16.
//
// Order: every y[t, n] is one chain of fused multiply-adds, k = 0, 1, ..., K-1, in one vector lane, from 0. The lane
// depends on n alone, the chain on nothing. Tiling and threads only choose which chains run side by side.
//
// Tiling: the weight is packed in panels of 2W output columns, k-major inside a panel, so that a panel is one
// stream through memory. In a bf16 panel the columns j and j + W share a 32-bit word, low and high half: a shift and
// a mask make floats of them, with no widening shuffle. A register tile is up to ROWS rows x one panel;
// a row costs two accumulators, so one pass over a panel serves ROWS rows. Rows are taken in chunks whose
// activations stay in L2 while the panels stream by. Where a chunk has many tiles, a bf16 panel is widened once for all of
// them. The (chunk, panel) pairs are dealt to threads in contiguous runs.
#include <vector>

#include "simd.h"

namespace {

constexpr int PANEL = 2 * W;
#if defined(__AVX512F__)
constexpr int ROWS = 12;  // 24 accumulators of 32 registers
#else
constexpr int ROWS = 6;  // 12 accumulators of 16 registers
#endif
constexpr int64_t CHUNK_BYTES = 512 * 1024;
constexpr int64_t WIDEN_TILES = 4;  // from so many register tiles on, widening a panel beforehand pays

inline void load_pair(const float* p, vf& low, vf& high) {
    low = load(p);
    high = load(p + W);
}

inline void load_pair(const bf16* p, vf& low, vf& high) {
    vu words;
    memcpy(&words, p, sizeof words);
    low = (vf)(words << 16);
    high = (vf)(words & 0xffff0000u);
}

template <int R, class Weight>
void tile(const float* x, const Weight* panel, const float* bias, float* y, int64_t k, int64_t n, int64_t columns) {
    vf sums[R][2] = {};
    for (int64_t i = 0; i < k; ++i) {
        vf low, high;
        load_pair(panel + i * PANEL, low, high);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            vf a = splat(x[r * k + i]);
            sums[r][0] = fma(a, low, sums[r][0]);
            sums[r][1] = fma(a, high, sums[r][1]);
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int half = 0; half < 2; ++half) {
            int64_t width = columns - half * W;
            if (width <= 0) break;
            vf sum = sums[r][half];
            float* out = y + r * n + half * W;
            if (width >= W) {
                store(out, bias ? sum + load(bias + half * W) : sum);
            } else {
                store_part(out, bias ? sum + load_part(bias + half * W, width) : sum, width);
            }
        }
    }
}

template <int R, class Weight>
void tile_of(int rows, const float* x, const Weight* panel, const float* bias, float* y, int64_t k, int64_t n,
             int64_t columns) {
    if constexpr (R > 1) {
        if (rows < R) return tile_of<R - 1>(rows, x, panel, bias, y, k, n, columns);
    }
    tile<R>(x, panel, bias, y, k, n, columns);
}

// Register tiles of nearly equal height over the rows [first, end): 13 rows as 7 and 6, not 12 and 1.
template <class Weight>
void rows_by_panel(const float* x, const Weight* panel, const float* bias, float* y, int64_t first, int64_t end,
                   int64_t tiles, int64_t k, int64_t n, int64_t columns) {
    for (int64_t i = 0; i < tiles; ++i) {
        const int64_t top = first + (end - first) * i / tiles;
        const int64_t bottom = first + (end - first) * (i + 1) / tiles;
        tile_of<ROWS>(bottom - top, x + top * k, panel, bias, y + top * n, k, n, columns);
    }
}

// The panel as floats: itself, or widened into `scratch`.
inline const float* widen(const float* panel, int64_t, std::vector<float>&) { return panel; }

inline const float* widen(const bf16* panel, int64_t k, std::vector<float>& scratch) {
    scratch.resize(k * PANEL);
    for (int64_t i = 0; i < k; ++i) {
        vf low, high;
        load_pair(panel + i * PANEL, low, high);
        store(&scratch[i * PANEL], low);
        store(&scratch[i * PANEL + W], high);
    }
    return scratch.data();
}

template <class Weight>
void linear(const float* x, const Weight* packed, const float* bias, float* y, int64_t t, int64_t n, int64_t k,
            int threads) {
    const int64_t panels = (n + PANEL - 1) / PANEL;
    int64_t chunk_rows = CHUNK_BYTES / (k * 4) / ROWS * ROWS;
    if (chunk_rows < ROWS) chunk_rows = ROWS;
    const int64_t chunks = (t + chunk_rows - 1) / chunk_rows;
    const int64_t units = chunks * panels;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> scratch;
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < units; ++unit) {
            const int64_t chunk = unit / panels, column = unit % panels * PANEL;
            const int64_t first = t * chunk / chunks, end = t * (chunk + 1) / chunks;
            const int64_t tiles = (end - first + ROWS - 1) / ROWS;
            const int64_t columns = n - column < PANEL ? n - column : PANEL;
            const Weight* panel = packed + column * k;
            const float* panel_bias = bias ? bias + column : nullptr;
            if (tiles >= WIDEN_TILES) {
                rows_by_panel(x, widen(panel, k, scratch), panel_bias, y + column, first, end, tiles, k, n, columns);
            } else {
                rows_by_panel(x, panel, panel_bias, y + column, first, end, tiles, k, n, columns);
            }
        }
    }
}

// Where column c of a panel's k-th row lies within the row.
inline int64_t place(const float*, int64_t c) { return c; }
inline int64_t place(const bf16*, int64_t c) { return c < W ? 2 * c : 2 * (c - W) + 1; }

template <class Weight>
void pack(const Weight* weight, Weight* packed, int64_t n, int64_t k, int threads) {
    const int64_t panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < panels; ++panel) {
        Weight* out = packed + panel * PANEL * k;
        for (int64_t i = 0; i < k; ++i) {
            for (int64_t c = 0; c < PANEL; ++c) {
                const int64_t row = panel * PANEL + c;
                out[i * PANEL + place(weight, c)] = row < n ? weight[row * k + i] : Weight{0};
            }
        }
    }
}

}  // namespace

extern "C" {

// Elements of the packed form of an [n, k] weight: n rounded up to whole panels.
int64_t moorage_linear_packed_size(int64_t n, int64_t k) { return (n + PANEL - 1) / PANEL * PANEL * k; }

void moorage_linear_pack_f32(const float* weight, float* packed, int64_t n, int64_t k, int threads) {
    pack(weight, packed, n, k, threads);
}

void moorage_linear_pack_bf16(const bf16* weight, bf16* packed, int64_t n, int64_t k, int threads) {
    pack(weight, packed, n, k, threads);
}

void moorage_linear_f32(const float* x, const float* packed, const float* bias, float* y, int64_t t, int64_t n,
                        int64_t k, int threads) {
    linear(x, packed, bias, y, t, n, k, threads);
}

void moorage_linear_bf16(const float* x, const bf16* packed, const float* bias, float* y, int64_t t, int64_t n,
                         int64_t k, int threads) {
    linear(x, packed, bias, y, t, n, k, threads);
}
}
