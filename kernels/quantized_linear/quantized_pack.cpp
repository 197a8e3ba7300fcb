// A quantized matrix is brought into panels, and single rows of it are read back as floats (embeddings).
#include "quantized.h"

namespace {

template <class F>
void pack(const int8_t* codes, const typename F::Scale* scales, const typename F::Scale* minimums, uint8_t* packed,
          int64_t n, int64_t k, int64_t group, int threads) {
    const int64_t panels = (n + PANEL - 1) / PANEL, groups = k / group, block = F::group_bytes(group);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < panels; ++panel) {
        uint8_t* out = packed + panel * groups * block;
        memset(out, 0, groups * block);
        const int64_t columns = n - panel * PANEL < PANEL ? n - panel * PANEL : PANEL;
        for (int64_t g = 0; g < groups; ++g) {
            auto* head = (typename F::Scale*)(out + g * block);
            auto* words = (uint32_t*)(out + g * block + F::HEAD_BYTES);
            for (int64_t column = 0; column < columns; ++column) {
                const int64_t row = panel * PANEL + column;
                head[column] = scales[row * groups + g];
                if (F::MINIMUM) head[PANEL + column] = minimums[row * groups + g];
                for (int64_t i = 0; i < group; ++i) {
                    const uint32_t code = (uint32_t)codes[row * k + g * group + i] & ((1 << F::BITS) - 1);
                    words[F::word_of(i, column)] |= code << F::bit_of(i, column);
                }
            }
        }
    }
}

// out[i] = w[ids[i]], float [t, k].
template <class F>
void rows(const uint8_t* packed, const int64_t* ids, float* out, int64_t t, int64_t k, int64_t group, int threads) {
    const int64_t groups = k / group, block = F::group_bytes(group);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < t; ++i) {
        float* row = out + i * k;
        const int64_t column = ids[i] % PANEL;
        const uint8_t* panel = packed + ids[i] / PANEL * groups * block;
        for (int64_t g = 0; g < groups; ++g) {
            const auto* head = (const typename F::Scale*)(panel + g * block);
            const auto* words = (const uint32_t*)(panel + g * block + F::HEAD_BYTES);
            const float scale = as_float(head[column]), minimum = F::MINIMUM ? as_float(head[PANEL + column]) : 0.0f;
            for (int64_t j = 0; j < group; ++j) {
                // The code comes to the top of the word; from there a shift brings its sign along.
                const uint32_t top = words[F::word_of(j, column)] << (32 - F::BITS - F::bit_of(j, column));
                const int32_t code = F::SIGNED ? (int32_t)top >> (32 - F::BITS) : (int32_t)(top >> (32 - F::BITS));
                row[g * group + j] = F::MINIMUM ? __builtin_fmaf(scale, code, minimum) : scale * code;
            }
        }
    }
}

}  // namespace

extern "C" {

// Bytes of the packed form of an [n, k] weight; 0: there is no such form.
int64_t moorage_quantized_packed_size(int64_t n, int64_t k, int64_t group, int bits, int scale_bytes, int minimum) {
    int64_t bytes = 0;
    with_form(bits, scale_bytes, minimum, [&](auto form) {
        bytes = (n + PANEL - 1) / PANEL * (k / group) * decltype(form)::group_bytes(group);
    });
    return bytes;
}

// codes [n, k]; scales and minimums [n, k / group], of scale_bytes each.
void moorage_quantized_pack(const int8_t* codes, const void* scales, const void* minimums, uint8_t* packed, int64_t n,
                            int64_t k, int64_t group, int bits, int scale_bytes, int minimum, int threads) {
    with_form(bits, scale_bytes, minimum, [&](auto form) {
        using F = decltype(form);
        using Scale = typename F::Scale;
        pack<F>(codes, (const Scale*)scales, (const Scale*)minimums, packed, n, k, group, threads);
    });
}

void moorage_quantized_rows(const uint8_t* packed, const int64_t* ids, float* out, int64_t t, int64_t k, int64_t group,
                            int bits, int scale_bytes, int minimum, int threads) {
    with_form(bits, scale_bytes, minimum, [&](auto form) {
        rows<decltype(form)>(packed, ids, out, t, k, group, threads);
    });
}
}
