// Causal attention of packed rows over keys and values in the blocks of a paged cache; q and y float, cache float or bf16.
//
// Order: a query at position p meets the keys in tiles of KEYS positions that start at multiples of KEYS.
// - score[j]: one chain of fused multiply-adds over the head's elements, 0 first. Hidden keys get -inf.
// - The running maximum m, and weight[j] = exp(score[j] - m), which is exactly 0 for a hidden key.
// - total = total * exp(old m - m) + the tile's weights, added lane by lane over its vectors, then as a tree of lanes.
// - y[d] = y[d] * exp(old m - m), then one chain of fused multiply-adds over the tile's keys, 0 first.
// A tile of which a query sees nothing multiplies by exactly 1 and adds exactly 0. So a query's result is a function
// of its own row's keys and of p; who shares its tile, where its chunk began, the block size and
// the placement of blocks have no part in it. Decode is the same code with one query.
//
// Tiling: a unit of work is (row, consecutive queries, kv heads); units are dealt to threads one by one. All query
// heads of a kv head are rows of the same two small matrix products per key tile, so keys and values are read, and
// widened, once for all of them. Keys are transposed on the way in: score[j] then has a lane. A unit with few queries
// waits for memory, so it takes all kv heads of a tile, which lie side by side, unless threads would be left idle.
#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

namespace {

constexpr int KEYS = 64;
constexpr int VECTORS = KEYS / W;
#if defined(__AVX512F__)
constexpr int ROWS = 6, COLUMNS = 4;  // register tile of the products: rows x vectors, 24 of 32 registers
#else
constexpr int ROWS = 6, COLUMNS = 2;  // 12 of 16
#endif
constexpr int64_t UNIT_ROWS = 48;     // queries x query heads of one kv head: they and a key tile stay in L1 and L2
constexpr int64_t TOGETHER_ROWS = 96;  // up to so many queries x query heads, a unit takes all kv heads

// c[r][j] += sum over i of a[r][i] * b[i][j], i = 0, 1, ...; R rows, C vectors of columns.
template <int R, int C>
inline void product_tile(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                         int64_t depth) {
    vf sums[R][C];
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < C; ++j) sums[r][j] = load(c + r * ldc + j * W);
    for (int64_t i = 0; i < depth; ++i) {
        vf columns[C];
        for (int j = 0; j < C; ++j) columns[j] = load(b + i * ldb + j * W);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            vf x = splat(a[r * lda + i]);
            for (int j = 0; j < C; ++j) sums[r][j] = fma(x, columns[j], sums[r][j]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int j = 0; j < C; ++j) store(c + r * ldc + j * W, sums[r][j]);
}

template <int R, int C>
void product_rows(int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
                  int64_t depth) {
    if constexpr (R > 1) {
        if (rows < R) return product_rows<R - 1, C>(rows, a, lda, b, ldb, c, ldc, depth);
    }
    product_tile<R, C>(a, lda, b, ldb, c, ldc, depth);
}

// `width` is a multiple of W.
void product(int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc,
             int64_t depth, int64_t width) {
    for (int64_t r = 0; r < rows; r += ROWS) {
        const int64_t count = rows - r < ROWS ? rows - r : ROWS;
        int64_t j = 0;
        for (; j + COLUMNS * W <= width; j += COLUMNS * W)
            product_rows<ROWS, COLUMNS>(count, a + r * lda, lda, b + j, ldb, c + r * ldc + j, ldc, depth);
        for (; j < width; j += W)
            product_rows<ROWS, 1>(count, a + r * lda, lda, b + j, ldb, c + r * ldc + j, ldc, depth);
    }
}

// A transposed vector of key words becomes one row (float) or two rows (bf16 pairs) of out[d][key].
inline void put_words(const float*, vf words, float* out) { store(out, words); }

inline void put_words(const bf16*, vf words, float* out) {
    store(out, (vf)((vu)words << 16));
    store(out + KEYS, (vf)((vu)words & 0xffff0000u));
}

// out[i][j] = keys[j][offset + i], i < d; a null row reads as zeros. d is a multiple of 8, so rows are whole words.
template <class Cache>
void transpose_keys(const Cache* const keys[KEYS], int64_t offset, int64_t d, float* out) {
    constexpr int64_t PER_WORD = 4 / sizeof(Cache);
    const int64_t words = d / PER_WORD;
    for (int64_t w = 0; w < words; w += W) {
        const int64_t count = words - w < W ? words - w : W;
        for (int j = 0; j < KEYS; j += W) {
            vf square[W];
            for (int i = 0; i < W; ++i) {
                if (!keys[j + i]) {
                    square[i] = vf{};
                    continue;
                }
                const float* row = reinterpret_cast<const float*>(keys[j + i] + offset) + w;
                square[i] = count == W ? load(row) : load_part(row, count);
            }
            transpose(square);
            for (int64_t i = 0; i < count; ++i) put_words(keys[0], square[i], out + (w + i) * PER_WORD * KEYS + j);
        }
    }
}

// out[j][i] = values[j][offset + i], widened, i < d; zeros up to `padded`. A null row reads as zeros.
template <class Cache>
void widen_values(const Cache* const values[KEYS], int64_t offset, int64_t d, int64_t padded, float* out) {
    const int64_t whole = d / W * W;
    for (int j = 0; j < KEYS; ++j) {
        float* row = out + j * padded;
        if (!values[j]) {
            for (int64_t i = 0; i < padded; i += W) store(row + i, vf{});
            continue;
        }
        const Cache* from = values[j] + offset;
        for (int64_t i = 0; i < whole; i += W) store(row + i, load(from + i));
        if (whole < d) store(row + whole, load_part(from + whole, d - whole));
    }
}

// Scores of one row -> weights, in place; brings maximum, total (both the same in all lanes) and y to the new maximum.
inline void softmax_step(float* scores, int64_t first_seen, int64_t end_seen, vf& maximum, vf& total, float* y,
                         int64_t padded) {
    vi lanes;
    for (int i = 0; i < W; ++i) lanes[i] = i;
    vf row[VECTORS];
    vf best = maximum;
    for (int j = 0; j < VECTORS; ++j) {
        const vi key = lanes + j * W;
        const vi seen = (key >= splat_int(first_seen)) & (key < splat_int(end_seen));
        row[j] = seen ? load(scores + j * W) : splat(-INFINITY);
        best = larger(row[j], best);
    }
    best = max_lanes(best);
    // A query that has seen nothing yet keeps -inf; 0 in its place makes all weights 0 and not NaN.
    const vf anchor = best == splat(-INFINITY) ? vf{} : best;
    vf sum = {};
    for (int j = 0; j < VECTORS; ++j) {
        const vf weights = exp_nonpositive(row[j] - anchor);
        store(scores + j * W, weights);
        sum = sum + weights;
    }
    const vf rescale = exp_nonpositive(maximum - anchor);
    total = fma(total, rescale, sum_lanes(sum));
    maximum = best;
    for (int64_t i = 0; i < padded; i += W) store(y + i, load(y + i) * rescale);
}

struct Shape {
    int64_t query_heads, kv_heads, head_size, block_size, columns, window;
    float scale;
};

// Working memory of a thread for units of up to `rows` queries x query heads.
struct Scratch {
    std::vector<float> q, keys, values, scores, y;
    std::vector<vf> maximum, total;

    Scratch(int64_t rows, int64_t d, int64_t padded)
        : q(rows * d), keys(d * KEYS), values(KEYS * padded), scores(rows * KEYS), y(rows * padded), maximum(rows),
          total(rows) {}
};

struct Unit {
    int64_t row, first, count;  // first: packed index of the first query
    int64_t kv_head, kv_heads;  // first of how many
};

// Where a tile's keys and values lie; null for a position that no query of the unit sees: it can hold anything.
template <class Cache>
struct Tile {
    const Cache *keys[KEYS], *values[KEYS];

    // Positions [base, base + KEYS) as far as they lie in [first, end); the unit's heads are asked for in advance.
    void locate(const Cache* key_cache, const Cache* value_cache, const int32_t* table, int64_t base, int64_t first,
                int64_t end, const Unit& unit, const Shape& shape) {
        constexpr int64_t LINE = 64 / sizeof(Cache);
        int64_t column = base / shape.block_size, place = base % shape.block_size;  // of the position base + j
        for (int64_t j = 0; j < KEYS; ++j, ++place) {
            if (place == shape.block_size) {
                place = 0;
                ++column;
            }
            keys[j] = values[j] = nullptr;
            if (base + j < first || base + j >= end) continue;
            const int64_t slot = int64_t{table[column]} * shape.block_size + place;
            const int64_t element = (slot * shape.kv_heads + unit.kv_head) * shape.head_size;
            keys[j] = key_cache + element;
            values[j] = value_cache + element;
            for (int64_t i = 0; i < unit.kv_heads * shape.head_size; i += LINE) {
                __builtin_prefetch(keys[j] + i);
                __builtin_prefetch(values[j] + i);
            }
        }
    }
};

// q and out point at the unit's first query, which sits at `position`; `table` is its row's.
template <class Cache>
void attend(const float* q, int64_t q_stride, const Cache* key_cache, const Cache* value_cache, const int32_t* table,
            float* out, int64_t position, const Unit& unit, const Shape& shape, Scratch& s) {
    const int64_t d = shape.head_size, padded = (d + W - 1) / W * W;
    const int64_t group = shape.query_heads / shape.kv_heads;
    // Row r of the scratch is query r % rows / group and head r / rows * group + r % group of the unit's heads.
    const int64_t rows = unit.count * group, all_rows = rows * unit.kv_heads;
    const auto head = [&](int64_t r) { return (unit.kv_head + r / rows) * group + r % group; };
    for (int64_t r = 0; r < all_rows; ++r) {
        const float* in = q + r % rows / group * q_stride + head(r) * d;
        for (int64_t i = 0; i < d; ++i) s.q[r * d + i] = in[i] * shape.scale;
        for (int64_t i = 0; i < padded; ++i) s.y[r * padded + i] = 0.0f;
        s.maximum[r] = splat(-INFINITY);
        s.total[r] = vf{};
    }

    const int64_t end = position + unit.count;  // keys [first, end) are seen by at least one query
    const int64_t first = shape.window && position >= shape.window ? position - shape.window + 1 : 0;
    Tile<Cache> tiles[2], *tile = tiles, *next = tiles + 1;
    tile->locate(key_cache, value_cache, table, first / KEYS * KEYS, first, end, unit, shape);
    for (int64_t base = first / KEYS * KEYS; base < end; base += KEYS) {
        next->locate(key_cache, value_cache, table, base + KEYS, first, end, unit, shape);
        for (int64_t h = 0; h < unit.kv_heads; ++h) {
            transpose_keys(tile->keys, h * d, d, s.keys.data());
            widen_values(tile->values, h * d, d, padded, s.values.data());
            for (int64_t i = 0; i < rows * KEYS; ++i) s.scores[i] = 0.0f;
            product(rows, &s.q[h * rows * d], d, s.keys.data(), KEYS, s.scores.data(), KEYS, d, KEYS);
            for (int64_t i = 0; i < rows; ++i) {
                const int64_t own = position + i / group, r = h * rows + i;
                const int64_t first_seen = shape.window ? own - shape.window + 1 - base : 0;
                softmax_step(&s.scores[i * KEYS], first_seen, own + 1 - base, s.maximum[r], s.total[r],
                             &s.y[r * padded], padded);
            }
            product(rows, s.scores.data(), KEYS, s.values.data(), padded, &s.y[h * rows * padded], padded, KEYS,
                    padded);
        }
        std::swap(tile, next);
    }

    for (int64_t r = 0; r < all_rows; ++r) {
        float* to = out + (r % rows / group * shape.query_heads + head(r)) * d;
        for (int64_t i = 0; i < d; ++i) to[i] = s.y[r * padded + i] / s.total[r][0];
    }
}

template <class Cache>
void paged_attention(const float* q, int64_t q_stride, const Cache* keys, const Cache* values, const int32_t* table,
                     const int32_t* cumulative, const int32_t* past, float* out, int64_t rows, const Shape& shape,
                     int threads) {
    const int64_t d = shape.head_size, group = shape.query_heads / shape.kv_heads;
    const int64_t queries = std::max<int64_t>(1, UNIT_ROWS / group);
    const bool together = threads == 1 || rows >= 2 * threads;
    std::vector<Unit> units;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t first = cumulative[row]; first < cumulative[row + 1]; first += queries) {
            const int64_t count = std::min(queries, cumulative[row + 1] - first);
            const int64_t heads = together && count * shape.query_heads <= TOGETHER_ROWS ? shape.kv_heads : 1;
            for (int64_t head = 0; head < shape.kv_heads; head += heads)
                units.push_back({row, first, count, head, heads});
        }
    const int64_t most_rows = std::max(queries * group, TOGETHER_ROWS);
#pragma omp parallel num_threads(threads)
    {
        Scratch scratch(most_rows, d, (d + W - 1) / W * W);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < (int64_t)units.size(); ++i) {
            const Unit& unit = units[i];
            attend(q + unit.first * q_stride, q_stride, keys, values, table + unit.row * shape.columns,
                   out + unit.first * shape.query_heads * d, past[unit.row] + unit.first - cumulative[unit.row], unit,
                   shape, scratch);
        }
    }
}

}  // namespace

extern "C" {

void moorage_paged_attention_f32(const float* q, int64_t q_stride, const float* keys, const float* values,
                                 const int32_t* table, const int32_t* cumulative, const int32_t* past, float* out,
                                 int64_t rows, int64_t query_heads, int64_t kv_heads, int64_t head_size,
                                 int64_t block_size, int64_t columns, float scale, int64_t window, int threads) {
    const Shape shape = {query_heads, kv_heads, head_size, block_size, columns, window, scale};
    paged_attention(q, q_stride, keys, values, table, cumulative, past, out, rows, shape, threads);
}

void moorage_paged_attention_bf16(const float* q, int64_t q_stride, const bf16* keys, const bf16* values,
                                  const int32_t* table, const int32_t* cumulative, const int32_t* past, float* out,
                                  int64_t rows, int64_t query_heads, int64_t kv_heads, int64_t head_size,
                                  int64_t block_size, int64_t columns, float scale, int64_t window, int threads) {
    const Shape shape = {query_heads, kv_heads, head_size, block_size, columns, window, scale};
    paged_attention(q, q_stride, keys, values, table, cumulative, past, out, rows, shape, threads);
}
}
