// Products of activations and packed weights.
//
// A weight matrix is cut into panels of NR output columns; a panel holds, for each word along the summed
// dimension, the words of its NR columns side by side:
//
//     panel p:  word 0 of columns p*NR .. p*NR+NR-1, then word 1 of the same columns, ...
//
// so one pass over a product reads the weights once, from front to back.  The words are taken in blocks whose
// lengths follow from their number alone; a sum runs over the words of a block from the first to the last in one
// float32 register, and the blocks are added in order.  So its bits do not depend on the number of rows, on their
// place among the others, or on the thread that computes it.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace sapwood {

constexpr int NR = 2 * VW;
// Activations that should stay in the second-level cache while the panels go by.
constexpr int ACTIVATION_BYTES = 384 * 1024;

// Rows of NR words that a panel holds for `steps` words of activations.  I4: for each span (see int4.h) one row of
// scales and minima, and half as many rows of weights as it has words.
template <class W>
constexpr int stored_rows(int steps) {
    return std::is_same<W, I4>::value ? steps / I4::SPAN_WORDS * (1 + I4::SPAN_WORDS / 2) : steps;
}

// Packed weights: `panels` panels of `stored` words by NR columns, to be multiplied with rows of `steps` words.
struct Matrix {
    uint32_t *words = nullptr;
    int steps = 0;
    int stored = 0;
    int panels = 0;
    std::vector<float> scale;  // of each column, for I8 alone: what a sum is to be multiplied with

    uint32_t *panel(int p) const { return words + size_t(p) * stored * NR; }
    size_t size() const { return size_t(panels) * stored * NR; }
};

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

// Memory that a row of a product is about to be written to.
struct Target {
    const void *at;
    int bytes;
};

// Brings memory near while a product goes on: a few cache lines of the next weights at a time, and towards the end of a
// row block the places where its results will go, one row at a time.  (Sooner, the weights would drive them out again.)
struct Lookahead {
    const char *at = nullptr, *end = nullptr;  // the next weights
    int lines = 0;                             // of them at a time
    Target targets[MR];                        // where the rows of this block go
    int next_target = 0, targets_end = 0;      // those not yet brought near; before them, steps to wait as negatives

    // Results of a block of `rows` rows, `steps` looks ahead long, go to target(row).
    template <class F>
    void expect(int rows, int steps, const F &target) {
        for (int r = 0; r < rows; ++r) {
            targets[r] = target(r);
            if (r > 0 && targets[r].at == targets[r - 1].at) targets[r - 1].bytes = 0;
        }
        targets_end = rows;
        next_target = std::min(0, rows + EARLY_STEPS - steps);
    }

    SAPWOOD_INLINE void advance() {
        for (int i = 0; i < lines && at < end; ++i, at += 64) __builtin_prefetch(at, 0, 2);
        if (next_target < targets_end) {
            if (next_target >= 0)
                for (int i = 0; i < targets[next_target].bytes; i += 64)
                    __builtin_prefetch(static_cast<const char *>(targets[next_target].at) + i, 1, 3);
            ++next_target;
        }
    }

    // The same where no register may be lost to it.
    __attribute__((noinline)) void advance_apart() { advance(); }

  private:
    static constexpr int EARLY_STEPS = 4;
};

// Rows of activations as a product takes them; `groups` for quantized weights alone.
struct Activations {
    const uint32_t *words;
    ptrdiff_t stride;  // words from one row to the next
    const GroupScale *groups = nullptr;
    ptrdiff_t group_stride = 0;

    Activations from(int row, int word, int group_words) const {
        const GroupScale *at = groups ? groups + row * group_stride + word / group_words : nullptr;
        return {words + row * stride + word, stride, at, group_stride};
    }
};

// sum[r] += row r of `a` times `steps` words of a panel.
template <class W, int ROWS>
SAPWOOD_INLINE void multiply_words(typename W::sum (&sum)[ROWS][2], const uint32_t *a, ptrdiff_t lda,
                                   const uint32_t *panel, int steps, Lookahead &ahead) {
    int k = 0;
    for (; k + 4 <= steps; k += 4) {
        ahead.advance();
        accumulate<W, ROWS>(sum, a + k, lda, panel + ptrdiff_t(k) * NR, panel + ptrdiff_t(k) * NR + VW, NR, 4);
    }
    accumulate<W, ROWS>(sum, a + k, lda, panel + ptrdiff_t(k) * NR, panel + ptrdiff_t(k) * NR + VW, NR, steps - k);
}

// The same for I4: each span is a sum of whole numbers, scaled and added to what is there.
template <int ROWS>
SAPWOOD_INLINE void multiply_spans(const Activations &a, const uint32_t *panel, int steps, float *c, ptrdiff_t ldc,
                                   bool go_on, Lookahead &ahead) {
    const vu low = splat_word(0x0f0f0f0fu);
    for (int k = 0; k < steps; k += I4::SPAN_WORDS) {
        ahead.advance_apart();
        const vu scales[2] = {load<vu>(panel), load<vu>(panel + VW)};
        panel += NR;
        vi sum[ROWS][2] = {};
        for (int w = 0; w < I4::SPAN_WORDS; w += 2, panel += NR) {
            const vu b0 = load<vu>(panel), b1 = load<vu>(panel + VW);
            const vu b[2][2] = {{b0 & low, b1 & low}, {(b0 >> 4) & low, (b1 >> 4) & low}};
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half)
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r) {
                    const vu x = splat_word(a.words[r * a.stride + k + w + half]);
                    sum[r][0] = I4::dot(sum[r][0], b[half][0], x);
                    sum[r][1] = I4::dot(sum[r][1], b[half][1], x);
                }
        }
        const int span = k / I4::SPAN_WORDS, spans = I4::GROUP / I4::SPAN_WORDS;
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const GroupScale &group = a.groups[r * a.group_stride + span / spans];
            const vf scale = splat(group.scale), whole = splat(group.sums[span % spans]);
#pragma GCC unroll 2
            for (int j = 0; j < 2; ++j) {
                float *to = c + r * ldc + j * VW;
                const vf before = go_on || k ? load<vf>(to) : vf{};
                const vf step = (vf)(scales[j] << 16), least = (vf)(scales[j] & 0xffff0000u);
                store(to, fma(__builtin_convertvector(sum[r][j], vf) * step, scale, fma(least, whole, before)));
            }
        }
    }
}

// c[r] = (what is there, where go_on) + row r of `a` times `steps` words of a panel.
template <class W, int ROWS>
void multiply_rows(const Activations &a, const uint32_t *panel, int steps, float *c, ptrdiff_t ldc, bool go_on,
                   Lookahead &ahead) {
    typename W::sum sum[ROWS][2];
    if constexpr (std::is_same<W, I4>::value) {
        multiply_spans<ROWS>(a, panel, steps, c, ldc, go_on, ahead);
    } else if constexpr (std::is_same<W, I8>::value) {
        for (int k = 0, group = 0; k < steps; k += W::GROUP, ++group) {
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r)
                for (int j = 0; j < 2; ++j)
                    sum[r][j] = vi{} - a.groups[r * a.group_stride + group].excess;
            multiply_words<W, ROWS>(sum, a.words + k, a.stride, panel + ptrdiff_t(k) * NR,
                                    std::min(W::GROUP, steps - k), ahead);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) {
                const vf scale = splat(a.groups[r * a.group_stride + group].scale);
                for (int j = 0; j < 2; ++j) {
                    float *to = c + r * ldc + j * VW;
                    const vf before = go_on || k ? load<vf>(to) : vf{};
                    store(to, fma(__builtin_convertvector(sum[r][j], vf), scale, before));
                }
            }
        }
    } else {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r)
            for (int j = 0; j < 2; ++j) sum[r][j] = vf{};
        multiply_words<W, ROWS>(sum, a.words, a.stride, panel, steps, ahead);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r)
            for (int j = 0; j < 2; ++j) {
                float *to = c + r * ldc + j * VW;
                store(to, go_on ? load<vf>(to) + sum[r][j] : sum[r][j]);
            }
    }
}

// Calls f with std::integral_constant<int, rows>, 1 <= rows <= MR.
template <int N = MR, class F>
SAPWOOD_INLINE void with_rows(int rows, const F &f) {
    if constexpr (N == 1) {
        f(std::integral_constant<int, 1>{});
    } else {
        if (rows == N)
            f(std::integral_constant<int, N>{});
        else
            with_rows<N - 1>(rows, f);
    }
}

// Cuts `rows` into blocks of at most MR rows that differ by one row at most: calls f(first row, rows of the block).
template <class F>
SAPWOOD_INLINE void each_row_block(int rows, const F &f) {
    const int blocks = (rows + MR - 1) / MR;
    for (int b = 0, row = 0; b < blocks; ++b) {
        const int n = rows / blocks + (b < rows % blocks);
        f(row, n);
        row += n;
    }
}

// c[rows][wide * NR] = the first `rows` (at most MR) rows of `a` times `wide` panels.
template <class W>
void multiply_block(const Activations &a, int rows, const Matrix &m, int panel, int wide, float *c, Lookahead &ahead) {
    const int pieces = (m.steps + W::BLOCK_WORDS - 1) / W::BLOCK_WORDS, columns = wide * NR;
    const int most = round_up((m.steps + pieces - 1) / pieces, W::GROUP);
    for (int p = 0; p < wide; ++p, c += NR) {
        for (int k = 0; k < m.steps; k += most) {
            const uint32_t *words = m.panel(panel + p) + ptrdiff_t(stored_rows<W>(k)) * NR;
            with_rows(rows, [&](auto fixed) {
                multiply_rows<W, decltype(fixed)::value>(a.from(0, k, W::GROUP), words, std::min(most, m.steps - k), c,
                                                         columns, k > 0, ahead);
            });
        }
        if (std::is_same<W, I8>::value)
            for (int j = 0; j < NR; j += VW) {
                const vf scale = load<vf>(&m.scale[size_t(panel + p) * NR + j]);
                for (int r = 0; r < rows; ++r) store(c + r * columns + j, load<vf>(c + r * columns + j) * scale);
            }
    }
}

// How many words of a product with W lie between two looks ahead.
template <class W>
constexpr int look_steps() {
    return std::is_same<W, I4>::value ? I4::SPAN_WORDS : 4;
}

// For a unit of `blocks` row blocks at `wide` panels from `panel`: brings weights near, those of the next unit while
// several blocks use these.  A single block of many rows looks a little ahead in its own.  One of few rows reads at the
// speed of memory, from front to back, which the processor sees by itself and does better.
template <class W>
Lookahead look_ahead(const Matrix &m, int panel, int wide, int blocks, int rows) {
    constexpr int FEW_ROWS = 7, AHEAD_BYTES = 8192;
    const auto from = [&](int p) { return reinterpret_cast<const char *>(m.panel(std::min(p, m.panels))); };
    Lookahead ahead;
    if (rows <= FEW_ROWS) return ahead;
    ahead.at = blocks > 1 ? from(panel + wide) : from(panel) + AHEAD_BYTES;
    ahead.end = from(panel + 2 * wide);
    const int lines = stored_rows<W>(look_steps<W>()) * NR * int(sizeof(uint32_t)) / 64;
    ahead.lines = (lines + blocks - 1) / blocks;
    return ahead;
}

// Rows that one unit of work takes, so that they stay in cache and every thread gets some.
inline int rows_of_unit(int rows, int steps) {
    const int most = std::max(4 * MR, ACTIVATION_BYTES / (steps * int(sizeof(uint32_t))) / MR * MR);
    const int units = (rows + most - 1) / most;
    return round_up((rows + units - 1) / units, MR);
}

// Fills one panel: column c is the weight row [n] at rows[c]; columns where it is null stay as they are.  Groups of
// `group` elements along the row are spread to a distance of `spread`.
template <class T>
void pack_panel(const typename T::elem *const (&rows)[NR], int n, int group, int spread, int steps, uint32_t *panel) {
    std::vector<uint32_t> row(steps);
    auto *elems = reinterpret_cast<typename T::elem *>(row.data());
    for (int c = 0; c < NR; ++c) {
        if (!rows[c]) continue;
        for (int i = 0, to = 0; i < n; i += group, to += spread)
            std::memcpy(elems + to, rows[c] + i, size_t(group) * sizeof(*elems));
        for (int k = 0; k < steps; ++k) panel[size_t(k) * NR + c] = row[k];
    }
}

// The same with weights quantized to bytes, the largest of each column to MOST; OFFSET is added to every byte.
template <class T>
void quantize_panel(const typename T::elem *const (&rows)[NR], int n, int group, int spread, Matrix &m, int panel) {
    std::vector<uint32_t> row(m.steps, 0x01010101u * uint32_t(I8::OFFSET));
    uint8_t *bytes = reinterpret_cast<uint8_t *>(row.data());
    for (int c = 0; c < NR; ++c) {
        if (!rows[c]) continue;
        float most = 0.0f;
        for (int i = 0; i < n; ++i) most = std::max(most, std::fabs(T::get(rows[c][i])));
        const float scale = most > 0.0f ? float(I8::MOST) / most : 0.0f;
        for (int i = 0, to = 0; i < n; i += group, to += spread)
            for (int j = 0; j < group; ++j)
                bytes[to + j] = uint8_t(int(std::nearbyint(T::get(rows[c][i + j]) * scale)) + I8::OFFSET);
        m.scale[size_t(panel) * NR + c] = most / float(I8::MOST);
        uint32_t *words = m.panel(panel);
        for (int k = 0; k < m.steps; ++k) words[size_t(k) * NR + c] = row[k];
    }
}

}  // namespace sapwood
