// How a quantized matrix is packed: w[n, k] = scale * code (+ minimum), codes of 4 or 8 bits, one scale and, in some
// forms, one minimum for each group of consecutive k.
//
// Panels of 4W output columns; a panel is one stream through memory, group by group: 4W scales, 4W minimums, then the
// codes, k-major. A word holds codes of columns j, j + W, j + 2W and j + 3W, so that shifts make vectors of them; in 4
// bits its lower half is one k and its upper half the next.
#pragma once

#include <vector>

#include "simd.h"

namespace {

constexpr int PARTS = 4;
constexpr int PANEL = PARTS * W;

// One kind of packed matrix. Codes are unsigned in 4 bits beside a minimum, else signed.
template <int BITS_, class Scale_, bool MINIMUM_>
struct Form {
    using Scale = Scale_;
    static constexpr int BITS = BITS_;
    static constexpr bool MINIMUM = MINIMUM_, SIGNED = BITS == 8 || !MINIMUM;
    static constexpr int AT_ONCE = 8 / BITS;  // k's in one word
    static constexpr int64_t HEAD_BYTES = PANEL * sizeof(Scale) * (MINIMUM ? 2 : 1);
    static constexpr int64_t LINE_BYTES = W * 4;  // of AT_ONCE k's
    static constexpr int64_t group_bytes(int64_t group) { return HEAD_BYTES + group / AT_ONCE * LINE_BYTES; }
    // The code of (k within the group, column) lies in this word of the group's, so many bits from its low end.
    static constexpr int64_t word_of(int64_t k, int64_t column) { return k / AT_ONCE * W + column % W; }
    static constexpr int bit_of(int64_t k, int64_t column) { return (k % AT_ONCE * PARTS + column / W) * BITS; }

    // Parts [first, first + P) of one group: scales and minimums in registers.
    template <int P>
    struct Group {
        vf scales[P], minimums[P];
        int first;

        Group(const uint8_t* block, int first) : first(first) {
            const Scale* head = (const Scale*)block + first * W;
            for (int i = 0; i < P; ++i) {
                scales[i] = load(head + i * W);
                minimums[i] = MINIMUM ? load(head + PANEL + i * W) : vf{};
            }
        }

        // w of the `step`-th k in a line, part first + i.
        vf weight(const uint8_t* line, int step, int i) const {
            vu words;
            memcpy(&words, line, sizeof words);
            const vf code = decode(words, step * PARTS + first + i);
            return MINIMUM ? fma(scales[i], code, minimums[i]) : scales[i] * code;
        }
    };

    // The place-th code of each word as a float.
    static vf decode(vu words, int place) {
#if defined(__AVX512F__)
        if (BITS == 4) {
            // The instruction looks at the four low bits alone.
            const __m512 table = SIGNED ? _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1)
                                        : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            return (vf)_mm512_permutexvar_ps((__m512i)(words >> (4 * place)), table);
        }
#endif
        const vu top = words << (32 - BITS - BITS * place);
        return __builtin_convertvector(SIGNED ? (vi)top >> (32 - BITS) : (vi)(top >> (32 - BITS)), vf);
    }
};

// Calls action(Form) for the form that these numbers name.
template <class Action>
void with_form(int bits, int scale_bytes, int minimum, Action action) {
    if (bits == 4 && scale_bytes == 2 && !minimum) return action(Form<4, half, false>{});
    if (bits == 4 && scale_bytes == 2 && minimum) return action(Form<4, half, true>{});
    if (bits == 4 && scale_bytes == 4 && minimum) return action(Form<4, float, true>{});
    if (bits == 8 && scale_bytes == 2 && !minimum) return action(Form<8, half, false>{});
    if (bits == 8 && scale_bytes == 2 && minimum) return action(Form<8, half, true>{});
    if (bits == 8 && scale_bytes == 4 && !minimum) return action(Form<8, float, false>{});
    if (bits == 8 && scale_bytes == 4 && minimum) return action(Form<8, float, true>{});
}

struct Problem {
    const float* x;
    const uint8_t* packed;
    const float* bias;
    float* y;
    int64_t t, n, k, group;
};

constexpr int64_t CHUNK_ROWS = 240;
constexpr int64_t STRETCH = 128;  // k's of a panel that are written out at once, a multiple of every group

// Writes the columns of one row that exist, with their bias.
inline void finish(const float* sums, const float* bias, float* y, int64_t columns) {
    for (int64_t at = 0; at < columns; at += W) {
        const vf sum = load(sums + at);
        if (columns - at >= W) {
            store(y + at, bias ? sum + load(bias + at) : sum);
        } else {
            store_part(y + at, bias ? sum + load_part(bias + at, columns - at) : sum, columns - at);
        }
    }
}

// Deals the (chunk of rows, panel) pairs to threads in contiguous runs. carry(problem, first row, rows, panel, scratch,
// sums) adds all of K to sums [rows][PANEL]; scratch: `size` floats of one thread.
template <class F, class Carry>
void for_each_panel(const Problem& p, int64_t size, int threads, Carry carry) {
    const int64_t panels = (p.n + PANEL - 1) / PANEL, panel_bytes = p.k / p.group * F::group_bytes(p.group);
    const int64_t chunks = (p.t + CHUNK_ROWS - 1) / CHUNK_ROWS;
    const int64_t units = chunks * panels;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> scratch(size), sums;
#pragma omp for schedule(static)
        for (int64_t unit = 0; unit < units; ++unit) {
            const int64_t chunk = unit / panels, column = unit % panels * PANEL;
            const int64_t first = p.t * chunk / chunks, rows = p.t * (chunk + 1) / chunks - first;
            const int64_t columns = p.n - column < PANEL ? p.n - column : PANEL;
            const float* bias = p.bias ? p.bias + column : nullptr;
            sums.assign(rows * PANEL, 0.0f);
            carry(p, first, rows, p.packed + column / PANEL * panel_bytes, scratch.data(), sums.data());
            for (int64_t r = 0; r < rows; ++r) {
                finish(&sums[r * PANEL], bias, p.y + (first + r) * p.n + column, columns);
            }
        }
    }
}

}  // namespace
