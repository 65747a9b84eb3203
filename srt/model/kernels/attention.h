// Attention over pages: online softmax over tiles at fixed absolute positions.
//
// The positions of a sequence are cut into segments of SEGMENT tokens and these into tiles of TILE tokens, counted
// from position 0.  For one query and head, a segment starts from an empty sum and takes its tiles in order; the
// segments are then merged in order.  So the order of operations depends on the query's position alone: not on
// the chunk that it came in, on the page size, on which other queries are computed beside it, nor on whether a
// segment was computed together with other requests that share its pages.  A tile that is wholly masked for a
// query changes nothing, bit for bit.  (Online softmax: Milakov and Gimelshein 2018; tiles: Dao et al. 2022;
// segments computed apart and merged: Flash-Decoding, 2023.)
#pragma once

#include <limits>
#include <vector>

#include "attention_plan.h"
#include "gemm.h"
#include "memory.h"
#include "pages.h"

namespace sapwood {

constexpr float NOTHING = -1e30f;

// What the keys so far gave each query row: values weighted by chances relative to the row's highest score, the chances
// themselves, added up lane by lane, and that score.
struct AttentionSums {
    Lines<float> values, weight, top;

    void prepare(int rows, int dim) {
        values.resize(size_t(rows) * dim);
        weight.resize(size_t(rows) * VW);
        top.resize(rows + VW);  // read by whole vectors
    }

    void clear(int rows, int dim) {
        std::fill(values.begin(), values.begin() + size_t(rows) * dim, 0.0f);
        std::fill(weight.begin(), weight.begin() + size_t(rows) * VW, 0.0f);
        std::fill(top.begin(), top.begin() + rows, NOTHING);
    }
};

// Memory that one worker uses.
struct AttentionScratch {
    AttentionSums segment, all;
    Lines<float> scores, factor;
    Lines<uint32_t> chances, k_strips, v_strips;

    void prepare(int group, int dim) {
        const int rows = std::max(QUERY_ROWS, SHORT_ROW * group);  // a short row is never cut
        for (auto *sums : {&segment, &all}) sums->prepare(rows, dim);
        scores.resize(MR * TILE);
        factor.resize(VW);
        chances.resize(MR * TILE);
        k_strips.resize(size_t(TILE) * dim);
        v_strips.resize(size_t(TILE) * dim);
    }
};

// The attention of one layer.  KV: the number format of the pool.
template <class T, class KV>
struct Attention {
    typedef typename T::elem elem;
    const AttentionPlan &plan;
    const PagePool<T, KV> &pool;
    int layer, heads, group, dim;  // heads: of K and V; dim: as stored, a multiple of STRIP
    float scale;                   // of the scores, times log2(e)
    float cap, cap_scale;          // a score s becomes cap * tanh(s * cap_scale) first; cap 0: it does not
    const uint32_t *queries;       // [KV head][query][head of the group][dim] elements
    ptrdiff_t out_stride;          // elements from one token's output to the next
    elem *out;                     // [token][head][dim]
    float *partials;               // [partial][head][partial_size(dim)]: AttentionSums of a segment

    int words() const { return dim / T::PER_WORD; }
    const uint32_t *query_words(int head, int query) const {
        return queries + (size_t(head) * plan.position.size() + query) * group * words();
    }

    static constexpr int partial_size(int dim) { return dim + 2 * VW; }

    void run_unit(const AttentionUnit &unit, int head, AttentionScratch &s) const {
        const int rows = unit.queries * group;
        for (int segment = unit.segment; segment < unit.last_segment; ++segment) {
            s.segment.clear(rows, dim);
            run_segment(unit, segment, head, s);
            if (unit.partial) {
                for (int r = 0; r < rows; ++r)
                    leave_partial(unit.query + r / group, segment, head * group + r % group, s.segment, r);
            } else if (segment == unit.segment) {
                std::swap(s.all, s.segment);
            } else {
                merge(s.all, s.segment, rows);
            }
        }
        if (!unit.partial)
            for (int r = 0; r < rows; ++r) finish(unit.query + r / group, head * group + r % group, s.all, r);
    }

    // Merges the partial sums of a query, for the heads of one KV head.
    void merge_query(int query, int head, AttentionScratch &s) const {
        for (int i = 0; i < plan.partial_count[query]; ++i) {
            AttentionSums &to = i == 0 ? s.all : s.segment;
            for (int g = 0; g < group; ++g) take_partial(query, i, head * group + g, to, g);
            if (i > 0) merge(s.all, s.segment, group);
        }
        for (int g = 0; g < group; ++g) finish(query, head * group + g, s.all, g);
    }

  private:
    float *partial(int index, int h) const {
        return partials + (size_t(index) * heads * group + h) * partial_size(dim);
    }

    void leave_partial(int query, int segment, int h, const AttentionSums &from, int r) const {
        float *to = partial(plan.partial_of(query, segment), h);
        std::memcpy(to, &from.values[size_t(r) * dim], size_t(dim) * sizeof(float));
        std::memcpy(to + dim, &from.weight[size_t(r) * VW], VW * sizeof(float));
        to[dim + VW] = from.top[r];
    }

    void take_partial(int query, int i, int h, AttentionSums &to, int r) const {
        const float *from = partial(plan.first_partial[query] + i, h);
        std::memcpy(&to.values[size_t(r) * dim], from, size_t(dim) * sizeof(float));
        std::memcpy(&to.weight[size_t(r) * VW], from + dim, VW * sizeof(float));
        to.top[r] = from[dim + VW];
    }

    // all = all and what follows it.
    void merge(AttentionSums &all, const AttentionSums &next, int rows) const {
        for (int first = 0; first < rows; first += VW) {
            const vf before = load<vf>(&all.top[first]), here = load<vf>(&next.top[first]), top = max(before, here);
            float keep[VW], take[VW], tops[VW];
            store(keep, exp2v(before - top));
            store(take, exp2v(here - top));
            store(tops, top);
            for (int r = first; r < std::min(rows, first + VW); ++r) {
                const vf kept = splat(keep[r - first]), taken = splat(take[r - first]);
                const auto add = [&](float *to, const float *from) {
                    store(to, fma(load<vf>(from), taken, load<vf>(to) * kept));
                };
                for (int d = 0; d < dim; d += VW) add(&all.values[size_t(r) * dim + d], &next.values[size_t(r) * dim + d]);
                add(&all.weight[size_t(r) * VW], &next.weight[size_t(r) * VW]);
                all.top[r] = tops[r - first];
            }
        }
    }

    void finish(int query, int h, const AttentionSums &all, int r) const {
        elem *to = out + plan.token[query] * out_stride + h * dim;
        const float *values = &all.values[size_t(r) * dim];
        const vf share = splat(1.0f / sum_lanes(load<vf>(&all.weight[size_t(r) * VW])));
        for (int d = 0; d < dim; d += VW) T::put(to + d, load<vf>(values + d) * share);
    }

    void run_segment(const AttentionUnit &unit, int segment, int head, AttentionScratch &s) const {
        const int end_row = unit.row + unit.rows;
        for (int from = segment * SEGMENT; from < (segment + 1) * SEGMENT; from += TILE)
            for (int row = unit.row; row < end_row;) {
                int next = row + 1;
                while (next < end_row && plan.rows[next].common >= from + TILE) ++next;
                const AttentionRow &first = plan.rows[row], &last = plan.rows[next - 1];
                const int query = std::max(unit.query, first.query);
                const int end = std::min(unit.query + unit.queries, last.query + last.queries);
                if (from < first.length) run_tile(first, from, head, query, end, unit.query, s);
                row = next;
            }
    }

    // Queries [query, end) against the tile that starts at position `from` of the pages of `row`.
    void run_tile(const AttentionRow &row, int from, int head, int query, int end, int base,
                  AttentionScratch &s) const {
        int lowest = std::numeric_limits<int>::max(), highest = -1;
        for (int q = query; q < end; ++q) {
            lowest = std::min(lowest, plan.position[q]);
            highest = std::max(highest, plan.position[q]);
        }
        if (highest < from || (plan.window > 0 && from + TILE <= lowest - plan.window + 1)) return;
        const uint32_t *k[TILE / STRIP], *v[TILE / STRIP];
        const int strips = std::min(TILE / STRIP, (std::min(highest + 1, row.length) - from + STRIP - 1) / STRIP);
        for (int i = 0; i < strips; ++i) find_strip(row, from + i * STRIP, i, head, s, k[i], v[i]);
        const uint32_t *words_of = query_words(head, query);
        const int rows = (end - query) * group, offset = (query - base) * group;
        each_row_block(rows, [&](int r, int count) {
            int low = std::numeric_limits<int>::max(), high = -1;
            for (int q = query + r / group; q <= query + (r + count - 1) / group; ++q) {
                low = std::min(low, plan.position[q]);
                high = std::max(high, plan.position[q]);
            }
            if (high < from || (plan.window > 0 && from + TILE <= low - plan.window + 1)) return;
            const int needed = std::min(strips, (high - from) / STRIP + 1);
            const bool masked = low < from + needed * STRIP - 1 || (plan.window > 0 && from <= high - plan.window);
            score(words_of + size_t(r) * words(), count, k, needed, s.scores.data());
            weigh(query * group + r, count, from, needed, masked, offset + r, s);
            add_values(count, v, needed, offset + r, s);
        });
    }

    // K and V of the STRIP tokens from position `from`: in place where the page holds them as a strip, else
    // gathered; V beyond the row's length is zero, so that what lies there cannot turn a sum into not-a-number.
    void find_strip(const AttentionRow &row, int from, int i, int head, AttentionScratch &s, const uint32_t *&k,
                    const uint32_t *&v) const {
        const int present = std::min(STRIP, row.length - from);
        uint32_t *v_to = &s.v_strips[size_t(i) * STRIP * words()];
        if constexpr (PagePool<T, KV>::CONVERTS) {
            uint32_t *k_to = &s.k_strips[size_t(i) * STRIP * words()];
            convert_strip(row, from, present, head, k_to, v_to);
            k = k_to;
            v = v_to;
        } else {
            place_strip(row, from, present, i, head, s, v_to, k, v);
        }
    }

    // Out of a pool in another format.
    void convert_strip(const AttentionRow &row, int from, int present, int head, uint32_t *k, uint32_t *v) const {
        if (pool.strip < STRIP) {
            std::fill(k, k + STRIP * words(), 0);
            std::fill(v, v + STRIP * words(), 0);
        }
        for (int t = 0; t < present; t += pool.strip)
            pool.read(row.table[(from + t) / pool.page_size], layer, head, (from + t) % pool.page_size,
                      std::min(pool.strip, present - t), t, reinterpret_cast<elem *>(k), reinterpret_cast<elem *>(v));
    }

    // Out of a pool in the format that attention takes.
    void place_strip(const AttentionRow &row, int from, int present, int i, int head, AttentionScratch &s,
                     uint32_t *v_to, const uint32_t *&k, const uint32_t *&v) const {
        if (pool.strip == STRIP) {
            const int page = row.table[from / pool.page_size], offset = from % pool.page_size;
            k = reinterpret_cast<const uint32_t *>(pool.k(page, layer, head) + size_t(offset) * dim);
            v = reinterpret_cast<const uint32_t *>(pool.v(page, layer, head) + size_t(offset) * dim);
            if (present < STRIP) {
                copy_v_start(v, present, v_to);
                v = v_to;
            }
            return;
        }
        uint32_t *k_to = &s.k_strips[size_t(i) * STRIP * words()];
        std::fill(k_to, k_to + STRIP * words(), 0);
        std::fill(v_to, v_to + STRIP * words(), 0);
        gather_k(row, from, present, head, k_to);
        gather_v(row, from, present, head, reinterpret_cast<elem *>(v_to));
        k = k_to;
        v = v_to;
    }

    // The first `present` tokens of a strip of V, and zeros.
    void copy_v_start(const uint32_t *from, int present, uint32_t *to) const {
        const int whole = present / T::PER_WORD * dim;
        std::memcpy(to, from, size_t(whole) * sizeof(uint32_t));
        std::fill(to + whole, to + STRIP * words(), 0);
        if (present % T::PER_WORD)
            for (int d = 0; d < dim; ++d) to[whole + d] = from[whole + d] & 0xffffu;
    }

    void gather_k(const AttentionRow &row, int from, int present, int head, uint32_t *to) const {
        for (int t = 0; t < present; t += pool.strip) {
            const int n = std::min(pool.strip, present - t), offset = (from + t) % pool.page_size;
            const uint32_t *strip = reinterpret_cast<const uint32_t *>(
                pool.k(row.table[(from + t) / pool.page_size], layer, head) + pool.k_at(offset, 0));
            for (int w = 0; w < words(); ++w)
                for (int j = 0; j < n; ++j) to[w * STRIP + t + j] = strip[w * pool.strip + j];
        }
    }

    void gather_v(const AttentionRow &row, int from, int present, int head, elem *to) const {
        for (int t = 0; t < present; ++t) {
            const int offset = (from + t) % pool.page_size;
            const elem *v = pool.v(row.table[(from + t) / pool.page_size], layer, head) + pool.v_at(offset, 0);
            elem *at = to + size_t(t / T::PER_WORD) * T::PER_WORD * dim + t % T::PER_WORD;
            for (int d = 0; d < dim; ++d) at[d * T::PER_WORD] = v[size_t(d) * pool.pair];
        }
    }

    // scores[count][TILE] = the raw products of `count` query rows and `strips` strips of K.
    void score(const uint32_t *q, int count, const uint32_t *const *k, int strips, float *scores) const {
        with_rows(count, [&](auto fixed) {
            constexpr int ROWS = decltype(fixed)::value;
            const int vectors = strips * STRIP / VW;
            for (int i = 0; i < vectors; i += 2) {
                const int j = std::min(i + 1, vectors - 1);
                vf sum[ROWS][2] = {};
                accumulate<T, ROWS>(sum, q, words(), k[i * VW / STRIP] + i * VW % STRIP,
                                    k[j * VW / STRIP] + j * VW % STRIP, STRIP, words());
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r) {
                    store(scores + r * TILE + j * VW, sum[r][1]);
                    store(scores + r * TILE + i * VW, sum[r][0]);
                }
            }
        });
    }

    // Turns scores into chances, relative to the highest score so far; `factor` is what older sums shrink by.
    void weigh(int first_row, int count, int from, int strips, bool masked, int at, AttentionScratch &s) const {
        static_assert(MR <= VW, "a vector has a lane for every row of a block");
        const int vectors = strips * STRIP / VW;
        float here[VW] = {};
        for (int r = 0; r < count; ++r) {
            float *scores = &s.scores[size_t(r) * TILE];
            if (cap > 0.0f)
                for (int i = 0; i < vectors; ++i)
                    store(scores + i * VW, tanhv(load<vf>(scores + i * VW) * splat(cap_scale)) * splat(cap));
            if (masked) mask(scores, vectors, from, plan.position[(first_row + r) / group]);
            vf most = load<vf>(scores);
            for (int i = 1; i < vectors; ++i) most = max(load<vf>(scores + i * VW), most);
            here[r] = max_lanes(most) * scale;
        }
        const vf before = load<vf>(&s.segment.top[at]), top = max(load<vf>(here), before);
        float best[VW];
        store(best, top);
        store(&s.factor[0], exp2v(before - top));
        for (int r = 0; r < count; ++r) {
            const float *scores = &s.scores[size_t(r) * TILE];
            elem *chances = reinterpret_cast<elem *>(&s.chances[size_t(r) * TILE]);
            vf weight = load<vf>(&s.segment.weight[size_t(at + r) * VW]) * splat(s.factor[r]);
            for (int i = 0; i < vectors; ++i) {
                const vf p = exp2v<T::PRECISE>(fma(load<vf>(scores + i * VW), splat(scale), splat(-best[r])));
                weight += p;
                T::put(chances + i * VW, p);
            }
            store(&s.segment.weight[size_t(at + r) * VW], weight);
            s.segment.top[at + r] = best[r];
        }
    }

    void mask(float *scores, int vectors, int from, int position) const {
        vi lane;
        for (int i = 0; i < VW; ++i) lane[i] = i;
        const int lowest = plan.window > 0 ? position - plan.window + 1 : 0;
        for (int i = 0; i < vectors; ++i) {
            const vi at = lane + (from + i * VW);
            const vi seen = (at <= position) & (at >= lowest);
            store(scores + i * VW, seen ? load<vf>(scores + i * VW) : splat(-std::numeric_limits<float>::infinity()));
        }
    }

    // sum = sum * factor + chances times V.
    void add_values(int count, const uint32_t *const *v, int strips, int at, AttentionScratch &s) const {
        with_rows(count, [&](auto fixed) {
            constexpr int ROWS = decltype(fixed)::value;
            for (int d = 0; d < dim; d += 2 * VW) {
                const int e = d + VW < dim ? d + VW : d;
                vf sum[ROWS][2];
                float *to = &s.segment.values[size_t(at) * dim];
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r) {
                    const vf factor = splat(s.factor[r]);
                    sum[r][0] = load<vf>(to + r * dim + d) * factor;
                    sum[r][1] = load<vf>(to + r * dim + e) * factor;
                }
                for (int i = 0; i < strips; ++i)
                    accumulate<T, ROWS>(sum, s.chances.data() + i * STRIP / T::PER_WORD, TILE, v[i] + d, v[i] + e,
                                        dim, STRIP / T::PER_WORD);
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r) {
                    store(to + r * dim + e, sum[r][1]);
                    store(to + r * dim + d, sum[r][0]);
                }
            }
        });
    }
};

}  // namespace sapwood
