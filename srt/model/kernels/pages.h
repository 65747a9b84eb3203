// How K and V lie in a page.
//
// The pool is one array [page][layer][KV head][K part, V part].  A part holds the page's tokens in strips of
// STRIP tokens (of the largest power of two that divides the page size, where that is smaller):
//
//     K strip:  word 0 (the first PER_WORD dimensions) of every token of the strip, then word 1 of every token, ...
//     V strip:  for PER_WORD tokens at a time: the elements of dimension 0 of these tokens, of dimension 1, ...
//
// which is how the dot product instructions take them: scores sum over dimensions, values sum over tokens.  Where KV is
// stored in another format than T, strips are read into T as they are used; the order of elements is that of T.  In 8
// bits a part ends with the scale of each token (float32).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "gemm.h"

namespace sapwood {

constexpr int STRIP = 16;

// T: the number format that attention takes.  KV: the one in the pool: T, BF16 or I8.
template <class T, class KV>
struct PagePool {
    typedef typename KV::elem elem;
    typedef typename T::elem taken;
    static constexpr int P = T::PER_WORD;
    static constexpr bool CONVERTS = !std::is_same<T, KV>::value, SCALED = std::is_same<KV, I8>::value;
    elem *base = nullptr;
    int page_size = 0, layers = 0, heads = 0, dim = 0;
    int strip = 0;  // tokens of a strip
    int pair = 0;   // tokens whose V elements lie side by side

    PagePool() = default;
    PagePool(void *memory, int page_size_, int layers_, int heads_, int dim_)
        : base(static_cast<elem *>(memory)), page_size(page_size_), layers(layers_), heads(heads_), dim(dim_) {
        strip = 1;
        while (strip < STRIP && page_size % (strip * 2) == 0) strip *= 2;
        pair = strip < P ? 1 : P;
    }

    size_t part() const { return size_t(page_size) * (dim + (SCALED ? sizeof(float) : 0)); }
    size_t page_elems() const { return part() * 2 * heads * layers; }
    elem *k(int page, int layer, int head) const {
        return base + ((size_t(page) * layers + layer) * heads + head) * 2 * part();
    }
    elem *v(int page, int layer, int head) const { return k(page, layer, head) + part(); }

    // The scales of a part's tokens.
    float *scales(elem *of) const { return reinterpret_cast<float *>(of + size_t(page_size) * dim); }

    // Where element d of the token at `offset` lies inside a part.
    size_t k_at(int offset, int d) const {
        return size_t(offset / strip) * strip * dim + (size_t(d / P) * strip + offset % strip) * P + d % P;
    }
    size_t v_at(int offset, int d) const {
        return size_t(offset / pair) * pair * dim + size_t(d) * pair + offset % pair;
    }

    // Writes K, or V, of a token: `x` [dim].
    void write(bool is_v, int page, int layer, int head, int offset, const float *x, elem *scratch) const {
        elem *to = is_v ? v(page, layer, head) : k(page, layer, head);
        if constexpr (SCALED) {
            scales(to)[offset] = quantize_whole(x, dim, scratch);
        } else {
            for (int i = 0; i < dim; i += VW) KV::put(scratch + i, load<vf>(x + i));
        }
        to += is_v ? v_at(offset, 0) : k_at(offset, 0);
        if (is_v)
            for (int d = 0; d < dim; ++d, to += pair) *to = scratch[d];
        else
            for (int w = 0; w < dim; w += P, to += strip * P) std::memcpy(to, scratch + w, P * sizeof(elem));
    }

    // The memory that write() will touch: a token's K lies scattered over its strip.
    Target target(bool is_v, int page, int layer, int head, int offset) const {
        if (is_v) return {v(page, layer, head) + v_at(offset, 0), dim * pair * int(sizeof(elem))};
        return {k(page, layer, head) + size_t(offset / strip) * strip * dim, strip * dim * int(sizeof(elem))};
    }

    // Copies the first `rows` tokens of every layer and head.
    void copy_rows(int from_page, int to_page, int rows) const {
        for (int layer = 0; layer < layers; ++layer)
            for (int head = 0; head < heads; ++head) {
                elem *k0 = k(from_page, layer, head), *v0 = v(from_page, layer, head);
                elem *k1 = k(to_page, layer, head), *v1 = v(to_page, layer, head);
                const int whole = rows / strip * strip;
                std::memcpy(k1, k0, size_t(whole) * dim * sizeof(elem));
                std::memcpy(v1, v0, size_t(whole) * dim * sizeof(elem));
                for (int t = whole; t < rows; ++t)
                    for (int d = 0; d < dim; ++d) {
                        k1[k_at(t, d)] = k0[k_at(t, d)];
                        v1[v_at(t, d)] = v0[v_at(t, d)];
                    }
                if (SCALED) {
                    std::memcpy(scales(k1), scales(k0), size_t(rows) * sizeof(float));
                    std::memcpy(scales(v1), scales(v0), size_t(rows) * sizeof(float));
                }
            }
    }

    // Reads the `n` tokens from `offset` of a page, which lie in one strip of the page, into the tokens from `at` of
    // strips of STRIP tokens in T; what is beyond the last of them in their words becomes zero.
    void read(int page, int layer, int head, int offset, int n, int at, taken *k_to, taken *v_to) const {
        elem *k_from = k(page, layer, head), *v_from = v(page, layer, head);
        float k_scale[STRIP] = {}, v_scale[STRIP] = {};
        if (SCALED) {
            std::memcpy(k_scale, scales(k_from) + offset, n * sizeof(float));
            std::memcpy(v_scale, scales(v_from) + offset, n * sizeof(float));
        }
        if (strip == STRIP && at == 0) {
            read_strip(k_from + size_t(offset) * dim, k_scale, n, k_to, true);
            read_strip(v_from + size_t(offset) * dim, v_scale, n, v_to, false);
            return;
        }
        for (int t = 0; t < n; ++t)
            for (int d = 0; d < dim; ++d) {
                k_to[(size_t(d / P) * STRIP + at + t) * P + d % P] = one(k_from[k_at(offset + t, d)], k_scale[t]);
                v_to[size_t((at + t) / P) * P * dim + size_t(d) * P + (at + t) % P] =
                    one(v_from[v_at(offset + t, d)], v_scale[t]);
            }
    }

  private:
    static SAPWOOD_INLINE vf take(const elem *from, vf scale) {
        if constexpr (SCALED)
            return from_bytes(from) * scale;
        else
            return KV::take(from);
    }

    // a, b, a, b, ...
    static SAPWOOD_INLINE vf alternate(float a, float b) {
        vi odd;
        for (int i = 0; i < VW; ++i) odd[i] = -(i & 1);
        return odd ? splat(b) : splat(a);
    }

    static taken one(elem x, float scale) {
        float wide[VW] = {};
        taken out[VW];
        if constexpr (SCALED)
            wide[0] = float(x) * scale;
        else
            wide[0] = KV::get(x);
        T::put(out, load<vf>(wide));
        return out[0];
    }

    // A whole strip of K or V.  Beyond the first `n` tokens V becomes zero; K may be anything.
    void read_strip(const elem *from, const float *scale, int n, taken *to, bool is_k) const {
        constexpr int WIDE = STRIP * P > VW ? STRIP * P : VW;
        float lanes[WIDE];
        if (is_k) {
            for (int i = 0; i < STRIP * P; ++i) lanes[i] = scale[i / P];
            for (int i = 0; i < STRIP * dim; i += STRIP * P)
                for (int j = 0; j < STRIP * P; j += VW) T::put(to + i + j, take(from + i + j, load<vf>(lanes + j)));
            return;
        }
        const int groups = (n + P - 1) / P;
        for (int g = 0; g < groups; ++g) {
            const vf by = P == 1 ? splat(scale[g]) : alternate(scale[g * P], scale[g * P + 1]);
            for (int i = g * P * dim; i < (g + 1) * P * dim; i += VW) T::put(to + i, take(from + i, by));
        }
        std::fill(to + groups * P * dim, to + STRIP * dim, taken{});
    }
};

}  // namespace sapwood
