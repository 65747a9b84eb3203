// Which queries of a step attend together, and to which pieces of their contexts: decided once for all layers.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "pages.h"
#include "simd.h"

namespace sapwood {

constexpr int TILE = 4 * STRIP;
constexpr int SEGMENT = 8 * TILE;
// Query rows (tokens times heads of a group) that are computed against a tile while it is in cache.
constexpr int QUERY_ROWS = 4 * MR;
// Rows with at most so many new tokens are computed together with others where they share pages.
constexpr int SHORT_ROW = 8;

// The arrays of one step (see srt/plan.py), checked by the caller; the same fields in the same order as in
// srt/model/native.py.  `wanted` are the tokens whose final hidden states, or logits, go to `out`.
struct StepArrays {
    int32_t tokens, rows, wanted_count, share_prefixes, want_logits;
    const int32_t *token_ids, *positions, *out_slots, *qo_indptr, *kv_indptr, *kv_indices, *kv_last_page_len;
    const int32_t *wanted;
    void *out;
};

// A piece of attention work: queries [query, query + queries) of the rows [row, row + rows) (both counted in the
// plan's order) over segments [segment, last_segment).
struct AttentionUnit {
    int row, rows, query, queries, segment, last_segment;
    bool partial;  // leaves its sums to be merged
};

struct AttentionRow {
    int query, queries;  // its queries, in the plan's order
    int length;          // tokens that it attends to, its own included
    int common;          // leading tokens whose pages it shares with the row before it
    int pages;
    const int32_t *table;
};

// Which queries are computed together: made once for a step, used by every layer and head.
struct AttentionPlan {
    std::vector<AttentionRow> rows;
    std::vector<int> order;           // batch token -> query
    std::vector<int> token;           // query -> batch token
    std::vector<int> position;        // of each query
    std::vector<int> first_partial;   // of each query: index of its first partial sum, -1 where it has none
    std::vector<int> partial_count;   // of each query
    std::vector<AttentionUnit> units;
    std::vector<int> merged;          // queries whose partial sums are to be merged
    int partials = 0;
    int window = 0;  // 0: none

    int first_segment(int pos) const { return window > 0 && pos >= window ? (pos - window + 1) / SEGMENT : 0; }

    void make(const StepArrays &step, int page_size, int heads, int group, int window_, int threads) {
        window = window_;
        sort_rows(step, page_size);
        number_queries(step);
        units.clear();
        const int most = std::max(1, QUERY_ROWS / group);
        int long_units = 0;
        for (const auto &row : rows)
            if (row.queries > SHORT_ROW) long_units += (row.queries + most - 1) / most;
        const bool split = long_units * heads < 4 * threads;
        for (size_t r = 0; r < rows.size(); ++r)
            if (rows[r].queries > SHORT_ROW) add_long(int(r), most, split);
        add_short(most);
        count_partials();
        std::stable_sort(units.begin(), units.end(), [&](const auto &a, const auto &b) { return cost(a) > cost(b); });
    }

  private:
    long cost(const AttentionUnit &u) const {
        const int end = std::min(u.last_segment * SEGMENT, position[u.query + u.queries - 1] + 1);
        return long(u.queries) * std::max(0, end - u.segment * SEGMENT);
    }

    void sort_rows(const StepArrays &step, int page_size) {
        rows.resize(step.rows);
        std::vector<int> by(step.rows);
        std::iota(by.begin(), by.end(), 0);
        const auto begin = [&](int r) { return step.kv_indices + step.kv_indptr[r]; };
        const auto end = [&](int r) { return step.kv_indices + step.kv_indptr[r + 1]; };
        if (step.share_prefixes)
            std::stable_sort(by.begin(), by.end(), [&](int a, int b) {
                const bool long_a = step.qo_indptr[a + 1] - step.qo_indptr[a] > SHORT_ROW;
                const bool long_b = step.qo_indptr[b + 1] - step.qo_indptr[b] > SHORT_ROW;
                if (long_a != long_b) return long_b;
                return std::lexicographical_compare(begin(a), end(a), begin(b), end(b));
            });
        order.resize(step.tokens);
        for (int i = 0, query = 0; i < step.rows; ++i) {
            const int r = by[i];
            AttentionRow &row = rows[i];
            row.query = query;
            row.queries = step.qo_indptr[r + 1] - step.qo_indptr[r];
            row.table = begin(r);
            row.pages = int(end(r) - begin(r));
            row.length = (row.pages - 1) * page_size + step.kv_last_page_len[r];
            row.common = 0;
            if (i > 0 && step.share_prefixes) {
                const AttentionRow &before = rows[i - 1];
                const int n = std::min(row.pages, before.pages);
                const int same = int(std::mismatch(row.table, row.table + n, before.table).first - row.table);
                row.common = std::min({same * page_size, row.length, before.length});
            }
            for (int t = 0; t < row.queries; ++t) order[step.qo_indptr[r] + t] = query++;
        }
    }

    void number_queries(const StepArrays &step) {
        token.resize(step.tokens);
        position.resize(step.tokens);
        for (int t = 0; t < step.tokens; ++t) {
            token[order[t]] = t;
            position[order[t]] = step.positions[t];
        }
    }

    void add_long(int r, int most, bool split) {
        const AttentionRow &row = rows[r];
        const int blocks = (row.queries + most - 1) / most;
        for (int b = 0, done = 0; b < blocks; ++b) {
            const int n = row.queries / blocks + (b < row.queries % blocks);
            const int query = row.query + done;
            const int first = first_segment(position[query]), last = position[query + n - 1] / SEGMENT + 1;
            if (split && last - first > 1) {
                for (int s = first; s < last; ++s) units.push_back({r, 1, query, n, s, s + 1, true});
            } else {
                units.push_back({r, 1, query, n, first, last, false});
            }
            done += n;
        }
    }

    // Segment by segment, runs of short rows that share at least its first tile.
    void add_short(int most) {
        int last = 0;
        for (const auto &row : rows)
            if (row.queries <= SHORT_ROW) last = std::max(last, (row.length - 1) / SEGMENT + 1);
        const auto takes_part = [&](const AttentionRow &row, int s) {
            return row.queries <= SHORT_ROW && s >= first_segment(position[row.query]) &&
                   s <= (row.length - 1) / SEGMENT;
        };
        for (int s = 0; s < last; ++s)
            for (int r = 0; r < int(rows.size());) {
                if (!takes_part(rows[r], s)) {
                    ++r;
                    continue;
                }
                int next = r + 1, queries = rows[r].queries;
                while (next < int(rows.size()) && takes_part(rows[next], s) &&
                       rows[next].common >= s * SEGMENT + TILE && queries + rows[next].queries <= most)
                    queries += rows[next++].queries;
                const bool whole = next == r + 1 && first_segment(position[rows[r].query]) == s &&
                                   s == (rows[r].length - 1) / SEGMENT;
                units.push_back({r, next - r, rows[r].query, queries, s, s + 1, !whole});
                r = next;
            }
    }

    void count_partials() {
        first_partial.assign(position.size(), -1);
        partial_count.assign(position.size(), 0);
        first_of_.assign(position.size(), 0);
        merged.clear();
        for (const auto &unit : units)
            if (unit.partial)
                for (int q = unit.query; q < unit.query + unit.queries; ++q) {
                    if (partial_count[q] == 0 || unit.segment < first_of_[q]) first_of_[q] = unit.segment;
                    ++partial_count[q];
                }
        partials = 0;
        for (int q = 0; q < int(position.size()); ++q)
            if (partial_count[q] > 0) {
                first_partial[q] = partials;
                partials += partial_count[q];
                merged.push_back(q);
            }
    }

  public:
    int partial_of(int query, int segment) const { return first_partial[query] + segment - first_of_[query]; }

  private:
    std::vector<int> first_of_;  // the first segment of each query that has partial sums
};

}  // namespace sapwood
