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
#include <vector>

#include "simd.h"

namespace sapwood {

constexpr int NR = 2 * VW;
// Activations that should stay in the second-level cache while the panels go by.
constexpr int ACTIVATION_BYTES = 384 * 1024;

// Packed weights: `panels` panels of `steps` words by NR columns.
struct Matrix {
    uint32_t *words = nullptr;
    int steps = 0;
    int panels = 0;

    const uint32_t *panel(int p) const { return words + size_t(p) * steps * NR; }
    size_t size() const { return size_t(panels) * steps * NR; }
};

constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

// Walks ahead through memory, a few cache lines at a time, to bring the next block of weights near.
struct Lookahead {
    const char *at;
    const char *end;
    int lines;

    SAPWOOD_INLINE void advance() {
        for (int i = 0; i < lines && at < end; ++i, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

template <class T, int ROWS>
void multiply_rows(const uint32_t *a, ptrdiff_t lda, const uint32_t *panel, int steps, float *c, ptrdiff_t ldc,
                   bool go_on, Lookahead &ahead) {
    vf sum[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < 2; ++j) sum[r][j] = vf{};
    int k = 0;
    for (; k + 4 <= steps; k += 4) {
        ahead.advance();
        accumulate<T, ROWS>(sum, a + k, lda, panel + ptrdiff_t(k) * NR, panel + ptrdiff_t(k) * NR + VW, NR, 4);
    }
    accumulate<T, ROWS>(sum, a + k, lda, panel + ptrdiff_t(k) * NR, panel + ptrdiff_t(k) * NR + VW, NR, steps - k);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
        for (int j = 0; j < 2; ++j) {
            float *to = c + r * ldc + j * VW;
            store(to, go_on ? load<vf>(to) + sum[r][j] : sum[r][j]);
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

// c[rows][NR] = a[rows][steps words] times one panel.
template <class T>
void multiply_panel(const uint32_t *a, ptrdiff_t lda, int rows, const uint32_t *panel, int steps, float *c,
                    ptrdiff_t ldc) {
    const int blocks = (rows + MR - 1) / MR;
    const int pieces = (steps + T::BLOCK_WORDS - 1) / T::BLOCK_WORDS;
    for (int piece = 0, k = 0; piece < pieces; ++piece) {
        const int n = steps / pieces + (piece < steps % pieces);
        const uint32_t *words = panel + ptrdiff_t(k) * NR;
        const char *next = reinterpret_cast<const char *>(words + ptrdiff_t(n) * NR);
        const int lines_of_four_steps = 4 * NR * int(sizeof(uint32_t)) / 64;
        Lookahead ahead{next, next + size_t(n) * NR * sizeof(uint32_t), (lines_of_four_steps + blocks - 1) / blocks};
        each_row_block(rows, [&](int row, int count) {
            with_rows(count, [&](auto fixed) {
                multiply_rows<T, decltype(fixed)::value>(a + row * lda + k, lda, words, n, c + row * ldc, ldc, k > 0,
                                                         ahead);
            });
        });
        k += n;
    }
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

}  // namespace sapwood
