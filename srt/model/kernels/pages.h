// How K and V lie in a page.
//
// The pool is one array [page][layer][KV head][K part, V part].  A part holds the page's tokens in strips of
// STRIP tokens (of the largest power of two that divides the page size, where that is smaller):
//
//     K strip:  word 0 (the first PER_WORD dimensions) of every token of the strip, then word 1 of every token, ...
//     V strip:  for PER_WORD tokens at a time: the elements of dimension 0 of these tokens, of dimension 1, ...
//
// which is how the dot product instructions take them: scores sum over dimensions, values sum over tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace sapwood {

constexpr int STRIP = 16;

template <class T>
struct PagePool {
    typedef typename T::elem elem;
    elem *base = nullptr;
    int page_size = 0, layers = 0, heads = 0, dim = 0;
    int strip = 0;  // tokens of a strip
    int pair = 0;   // tokens whose V elements lie side by side

    PagePool() = default;
    PagePool(void *memory, int page_size_, int layers_, int heads_, int dim_)
        : base(static_cast<elem *>(memory)), page_size(page_size_), layers(layers_), heads(heads_), dim(dim_) {
        strip = 1;
        while (strip < STRIP && page_size % (strip * 2) == 0) strip *= 2;
        pair = strip < T::PER_WORD ? 1 : T::PER_WORD;
    }

    size_t part() const { return size_t(page_size) * dim; }
    size_t page_elems() const { return part() * 2 * heads * layers; }
    elem *k(int page, int layer, int head) const {
        return base + ((size_t(page) * layers + layer) * heads + head) * 2 * part();
    }
    elem *v(int page, int layer, int head) const { return k(page, layer, head) + part(); }

    // Where element d of the token at `offset` lies inside a part.
    size_t k_at(int offset, int d) const {
        return size_t(offset / strip) * strip * dim +
               (size_t(d / T::PER_WORD) * strip + offset % strip) * T::PER_WORD + d % T::PER_WORD;
    }
    size_t v_at(int offset, int d) const {
        return size_t(offset / pair) * pair * dim + size_t(d) * pair + offset % pair;
    }

    void write_k(int page, int layer, int head, int offset, const elem *from) const {
        uint32_t *to = reinterpret_cast<uint32_t *>(k(page, layer, head) + k_at(offset, 0));
        for (int w = 0; w < dim / T::PER_WORD; ++w) {
            uint32_t word;
            std::memcpy(&word, from + w * T::PER_WORD, sizeof word);
            std::memcpy(to + size_t(w) * strip, &word, sizeof word);
        }
    }

    void write_v(int page, int layer, int head, int offset, const elem *from) const {
        elem *to = v(page, layer, head) + v_at(offset, 0);
        for (int d = 0; d < dim; ++d) to[size_t(d) * pair] = from[d];
    }

    // Copies the first `rows` tokens of every layer and head.
    void copy_rows(int from_page, int to_page, int rows) const {
        for (int layer = 0; layer < layers; ++layer)
            for (int head = 0; head < heads; ++head) {
                const elem *k0 = k(from_page, layer, head), *v0 = v(from_page, layer, head);
                elem *k1 = k(to_page, layer, head), *v1 = v(to_page, layer, head);
                const int whole = rows / strip * strip;
                std::memcpy(k1, k0, size_t(whole) * dim * sizeof(elem));
                std::memcpy(v1, v0, size_t(whole) * dim * sizeof(elem));
                for (int t = whole; t < rows; ++t)
                    for (int d = 0; d < dim; ++d) {
                        k1[k_at(t, d)] = k0[k_at(t, d)];
                        v1[v_at(t, d)] = v0[v_at(t, d)];
                    }
            }
    }
};

}  // namespace sapwood
