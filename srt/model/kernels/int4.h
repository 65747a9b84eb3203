// Packing weights into 4 bits.
//
// A span is SPAN weights of one column that lie one after another along the summed dimension.  In a panel it takes
// 1 + SPAN / 8 rows of words:
//
//     row 0:      scale (low half) and minimum (high half) of each column, as bfloat16
//     row 1 + w:  weights 8w .. 8w+3 in the low halves of a word's bytes, 8w+4 .. 8w+7 in the high ones
//
// so that two masks give the bytes that the dot product takes.
#pragma once

#include "gemm.h"

namespace sapwood {

inline uint32_t near_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// One span of weights in 4 bits.
struct Span {
    uint32_t scales = 0;  // the word of row 0
    uint8_t q[I4::SPAN] = {};
    float error = 0.0f;

    // Rounds `n` values to `step` apart from `least`; both to bfloat16 first.
    Span(const float *values, int n, float least, float step) {
        const uint32_t step_bits = near_bf16(step), least_bits = near_bf16(least);
        scales = least_bits << 16 | step_bits;
        step = from_bf16(uint16_t(step_bits));
        least = from_bf16(uint16_t(least_bits));
        const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
        for (int i = 0; i < n; ++i) {
            const float place = (values[i] - least) * inverse + 0.5f;
            const int whole = place > 0.0f ? int(place) : 0;
            q[i] = uint8_t(std::min(whole, I4::MOST));
            const float off = values[i] - (least + step * float(q[i]));
            error += off * off;
        }
    }
};

// The better of two ways to place the 16 values: from the least weight to the greatest, as GGUF's Q4_1 does; or around
// zero with the greatest magnitude at 8 steps, as Q4_0 does.  So weights that come from such a file are found again, to
// what their own rounding to bfloat16 and that of the scales leaves.
inline Span best_span(const float *values, int n) {
    const auto ends = std::minmax_element(values, values + n);
    const float least = *ends.first, most = *ends.second;
    const Span between(values, n, least, (most - least) / float(I4::MOST));
    const float step = std::max(most, -least) / 8.0f;
    const Span around(values, n, most > -least ? -7.0f * step : -8.0f * step, step);
    return around.error < between.error ? around : between;
}

// Fills one panel as quantize_panel() does.
template <class T>
void quantize_panel_spans(const typename T::elem *const (&rows)[NR], int n, int group, int spread, const Matrix &m,
                          int panel) {
    std::vector<float> values(m.steps * I4::PER_WORD);
    std::vector<uint8_t> there(values.size());
    for (int i = 0, to = 0; i < n; i += group, to += spread) std::fill_n(there.begin() + to, group, 1);
    for (int c = 0; c < NR; ++c) {
        if (!rows[c]) continue;
        for (int i = 0, to = 0; i < n; i += group, to += spread)
            for (int j = 0; j < group; ++j) values[to + j] = T::get(rows[c][i + j]);
        uint32_t *words = m.panel(panel) + c;
        for (int begin = 0; begin < int(values.size()); begin += I4::SPAN) {
            float kept[I4::SPAN];
            int count = 0;
            for (int i = 0; i < I4::SPAN; ++i)
                if (there[begin + i]) kept[count++] = values[begin + i];
            uint8_t q[I4::SPAN] = {};
            if (count > 0) {
                const Span span = best_span(kept, count);
                *words = span.scales;
                // Where there is no weight the activation is zero or was never written: no part of the sum.
                for (int i = 0, from = 0; i < I4::SPAN; ++i)
                    if (there[begin + i]) q[i] = span.q[from++];
            }
            words += NR;
            for (int i = 0; i < I4::SPAN; i += 2 * I4::PER_WORD, words += NR) {
                uint32_t word = 0;
                for (int j = 0; j < I4::PER_WORD; ++j)
                    word |= uint32_t(q[i + j] | q[i + I4::PER_WORD + j] << 4) << (8 * j);
                *words = word;
            }
        }
    }
}

}  // namespace sapwood
