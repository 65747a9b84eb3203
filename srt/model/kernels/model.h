// A decoder-only transformer: its packed weights, and one step through all of its layers.
#pragma once

#include <map>

#include "attention.h"
#include "measure.h"
#include "sampling.h"
#include "weights.h"

namespace sapwood {

// The parts of a step whose time is kept.
enum Phase { PREPARE, NORM, QKV, ATTENTION, OUTPUT, GATE_UP, DOWN_PHASE, HEAD_PHASE, PHASES };

// T: the number format of activations.  W: that of the packed weights, T, I8 or I4.  KV: that of the pool, T, BF16 or
// I8.
template <class T, class W, class KV>
class ModelOf {
    typedef typename T::elem elem;
    static constexpr int P = T::PER_WORD;
    static constexpr bool QUANTIZED = !std::is_same<T, W>::value;
    typedef typename Weights<T, W>::Layer Layer;

  public:
    explicit ModelOf(const Spec &spec)
        : s_(spec), pool_(spec.threads),
          inverse_frequencies_(spec.inverse_frequencies, spec.inverse_frequencies + spec.ropes * (spec.head_dim / 2)),
          windows_(spec.windows, spec.windows + spec.layers), weights_(spec, pool_), dim_(weights_.dim),
          group_(spec.heads / spec.kv_heads), hidden_(weights_.hidden), mid_(weights_.mid),
          pages_(spec.kv, spec.page_size, spec.layers, spec.kv_heads, dim_), scratch_(pool_.size()) {
        for (auto &scratch : scratch_) scratch.attention.prepare(group_, dim_);
    }

    Weights<T, W> &weights() { return weights_; }

    void forward(const StepArrays &step) {
        timed(PREPARE, [&] {
            prepare(step);
            embed(step);
        });
        for (int layer = 0; layer < s_.layers; ++layer) {
            const Layer &at = weights_.layers[layer];
            timed(NORM, [&] { norm(x_, at.attention_norm, step.tokens); });
            timed(QKV, [&] { project_qkv(step, layer); });
            const bool last = layer + 1 == s_.layers;
            if (last && step.wanted_count == 0) return;
            timed(ATTENTION, [&] { attend(layer); });
            int rows = step.tokens;
            if (last) {
                keep_only(step);
                rows = step.wanted_count;
            }
            timed(OUTPUT, [&] {
                add_product(ready(attended_, s_.heads * dim_, rows), at.o, at.o_bias, at.attention_post_norm, rows);
            });
            timed(NORM, [&] { norm(x_, at.mlp_norm, rows); });
            timed(GATE_UP, [&] { gate_up(at, rows); });
            timed(DOWN_PHASE, [&] {
                add_product(ready(middle_, mid_, rows), at.down, at.down_bias, at.mlp_post_norm, rows);
            });
        }
        timed(NORM, [&] { norm(x_, weights_.final_norm, step.wanted_count); });
        if (step.want_logits)
            timed(HEAD_PHASE, [&] { head(normed(), step.wanted_count, static_cast<float *>(step.out)); });
        else
            for (int i = 0; i < step.wanted_count; ++i)
                std::memcpy(static_cast<elem *>(step.out) + size_t(i) * s_.hidden, normed_ + i * stride(hidden_),
                            s_.hidden * sizeof(elem));
    }

    // Copies the seconds spent in each phase since the last call to `seconds` [PHASES].
    void take_seconds(double *seconds) {
        std::copy(seconds_, seconds_ + PHASES, seconds);
        std::fill(seconds_, seconds_ + PHASES, 0.0);
    }

    // What the machine does at best: operations per second, and bytes per second read from the packed weights.
    void peaks(double *operations, double *bytes) {
        *operations = peak_operations<W>(pool_, 100000);
        *bytes = read_bandwidth(pool_, weights_.words(), weights_.word_count());
    }

    void project(const elem *hidden, int rows, float *out) {
        uint32_t *words = memory_.normed.template need<uint32_t>(size_t(rows) * stride(hidden_));
        for (int i = 0; i < rows; ++i) {
            uint32_t *to = words + i * stride(hidden_);
            std::fill(to, to + hidden_ / P, 0);
            std::memcpy(to, hidden + size_t(i) * s_.hidden, s_.hidden * sizeof(elem));
        }
        need_quantized(rows, hidden_);
        head(ready(words, hidden_, rows), rows, out);
    }

    // Of `logits` [rows][vocab]: the first greatest of each row, -1 where one is not finite.
    void best(const float *logits, int rows, int32_t *out) {
        pool_.each(rows, [&](int r, int) {
            const float *row = logits + size_t(r) * s_.vocab;
            out[r] = all_finite(row, s_.vocab) ? first_greatest(row, s_.vocab) : -1;
        });
    }

    // The first greatest of each row that is named.
    void greedy(const float *logits, const int32_t *rows, int count, int32_t *out) {
        pool_.each(count, [&](int i, int) { out[i] = first_greatest(logits + size_t(rows[i]) * s_.vocab, s_.vocab); });
    }

    void draw(const float *logits, const DrawRow *rows, int count, int32_t *out) {
        pool_.each(count, [&](int i, int worker) {
            out[i] = scratch_[worker].drawer.draw(logits + size_t(rows[i].row) * s_.vocab, s_.vocab, rows[i]);
        });
    }

  private:
    struct Scratch {
        AttentionScratch attention;
        Drawer drawer;
        Lines<float> product;
        std::vector<typename KV::elem> head;
    };

    template <class F>
    void timed(Phase phase, const F &f) {
        const double begin = now();
        f();
        seconds_[phase] += now() - begin;
    }

    // Words from one row of activations to the next; not a multiple of 1 KB, where rows would share cache sets.
    static ptrdiff_t stride(int elems) {
        const int words = elems / P;
        return words % 256 == 0 ? words + 16 : words;
    }

    void prepare(const StepArrays &step) {
        const size_t n = std::max(step.tokens, step.wanted_count);
        x_ = memory_.x.template need<float>(n * hidden_);
        normed_ = memory_.normed.template need<uint32_t>(n * stride(hidden_));
        queries_ = memory_.queries.template need<uint32_t>(n * s_.heads * dim_ / P);
        attended_ = memory_.attended.template need<uint32_t>(n * stride(s_.heads * dim_));
        middle_ = memory_.middle.template need<uint32_t>(n * stride(mid_));
        cosines_ = memory_.cosines.template need<float>(n * s_.ropes * s_.head_dim);
        branch_ = memory_.branch.template need<float>(n * hidden_);
        const size_t kept = step.wanted_count;
        kept_x_ = memory_.kept_x.template need<float>(kept * hidden_);
        kept_attended_ = memory_.kept_attended.template need<uint32_t>(kept * stride(s_.heads * dim_));
        need_quantized(n, std::max({hidden_, mid_, s_.heads * dim_}));
        slots_.resize(step.tokens);
        for (int t = 0; t < step.tokens; ++t)
            slots_[t] = {step.out_slots[t] / s_.page_size, step.out_slots[t] % s_.page_size};
        plans_.clear();
        size_t partials = 0;
        for (int window : windows_)
            if (!plans_.count(window)) {
                plans_[window].make(step, s_.page_size, s_.kv_heads, group_, window, pool_.size());
                partials = std::max(partials, size_t(plans_[window].partials));
            }
        partials_ = memory_.partials.template need<float>(partials * s_.heads * Attention<T, KV>::partial_size(dim_));
    }

    void embed(const StepArrays &step) {
        const int half = s_.head_dim / 2;
        pool_.each((step.tokens + 7) / 8, [&](int block, int) {
            for (int t = block * 8; t < std::min(step.tokens, block * 8 + 8); ++t) {
                const size_t from = size_t(step.token_ids[t]) * s_.hidden;
                float *x = x_ + size_t(t) * hidden_;
                std::fill(x + s_.hidden, x + hidden_, 0.0f);
                for (int i = 0; i < s_.hidden; ++i)
                    x[i] = T::get(weights_.embedding[from + i]) * s_.embedding_scale;
                for (int rope = 0; rope < s_.ropes; ++rope) {
                    float *cosine = cosines_ + (size_t(t) * s_.ropes + rope) * s_.head_dim;
                    for (int i = 0; i < half; ++i) {
                        const float angle = float(step.positions[t]) * inverse_frequencies_[rope * half + i];
                        cosine[i] = std::cos(angle) * s_.rope_scale;
                        cosine[half + i] = std::sin(angle) * s_.rope_scale;
                    }
                }
            }
        });
    }

    static float inverse_rms(const float *x, int padded, int n, float eps) {
        vf sum{};
        for (int i = 0; i < padded; i += VW) sum = fma(load<vf>(x + i), load<vf>(x + i), sum);
        return 1.0f / std::sqrt(sum_lanes(sum) / float(n) + eps);
    }

    // normed_ = RMSNorm of the rows of x.
    void norm(const float *x, const std::vector<float> &weight, int rows) {
        pool_.each((rows + 7) / 8, [&](int block, int) {
            for (int r = block * 8; r < std::min(rows, block * 8 + 8); ++r) {
                const float *from = x + size_t(r) * hidden_;
                elem *to = reinterpret_cast<elem *>(normed_ + r * stride(hidden_));
                const vf scale = splat(inverse_rms(from, hidden_, s_.hidden, s_.norm_eps));
                for (int i = 0; i < hidden_; i += VW)
                    T::put(to + i, load<vf>(from + i) * scale * load<vf>(&weight[i]));
                if (QUANTIZED) quantize(normed_, hidden_, r);
            }
        });
    }

    static ptrdiff_t quantized_stride(int columns) { return columns / I8::PER_WORD + 16; }
    static ptrdiff_t groups_of(int columns) { return columns / (I8::PER_WORD * I8::GROUP) + 1; }

    void need_quantized(size_t rows, int columns) {
        if (!QUANTIZED) return;
        quantized_ = memory_.quantized.template need<uint32_t>(rows * quantized_stride(columns));
        groups_ = memory_.groups.template need<GroupScale>(rows * groups_of(columns));
    }

    // Row r of `from` to bytes, in quantized_ and groups_.
    void quantize(const uint32_t *from, int columns, int r) {
        quantize_row<T>(reinterpret_cast<const elem *>(from + r * stride(columns)), columns,
                        reinterpret_cast<int8_t *>(quantized_ + r * quantized_stride(columns)),
                        groups_ + r * groups_of(columns));
    }

    Activations quantized(int columns) const {
        return {quantized_, quantized_stride(columns), groups_, groups_of(columns)};
    }

    // What norm() left, as the next product takes it.
    Activations normed() const { return QUANTIZED ? quantized(hidden_) : Activations{normed_, stride(hidden_)}; }

    // Rows of elements as the next product takes them.
    Activations ready(const uint32_t *from, int columns, int rows) {
        if (!QUANTIZED) return {from, stride(columns)};
        pool_.each((rows + 7) / 8, [&](int block, int) {
            for (int r = block * 8; r < std::min(rows, block * 8 + 8); ++r) quantize(from, columns, r);
        });
        return quantized(columns);
    }

    // For every group of `wide` panels and every block of rows: the product, then
    // finish(first row, rows, group, product, worker), which writes a row's results to target(row, group).
    template <class M, class E, class F>
    void multiply(const Activations &a, int rows, const Matrix &m, int wide, const E &target, const F &finish) {
        if (rows == 0) return;
        const int chunk = rows_of_unit(rows, m.steps), chunks = (rows + chunk - 1) / chunk, groups = m.panels / wide;
        const int columns = wide * NR;
        // Where threads would get unlike shares of few groups, each group is done in two halves, one after the other.
        const int parts = chunks == 1 && rows > MR && groups % pool_.size() != 0 && groups < 16 * pool_.size() ? 2 : 1;
        pool_.each(chunks * groups * parts, [&](int unit, int worker) {
            const int part = unit % parts, group = unit / parts % groups;
            const int begin = unit / parts / groups * chunk, end = std::min(rows, begin + chunk);
            const int first = begin + (end - begin) * part / parts;
            const int count = begin + (end - begin) * (part + 1) / parts - first;
            auto &product = scratch_[worker].product;
            product.resize(size_t(MR) * columns);
            Lookahead ahead = look_ahead<M>(m, group * wide, wide, (count + MR - 1) / MR * parts, count);
            if (part > 0) ahead.at += (ahead.end - ahead.at) / 2;
            each_row_block(count, [&](int row, int n) {
                ahead.expect(n, m.steps / look_steps<M>() * wide,
                             [&](int r) { return target(first + row + r, group); });
                multiply_block<M>(a.from(first + row, 0, M::GROUP), n, m, group * wide, wide, product.data(), ahead);
                finish(first + row, n, group, product.data(), worker);
            });
        });
    }

    void project_qkv(const StepArrays &step, int layer) {
        const Layer &at = weights_.layers[layer];
        const int wide = weights_.head_panels * NR;
        const std::vector<int> &order = current_plan(layer).order;
        const auto target = [&](int token, int head) -> Target {
            if (head < s_.heads) return {query_at(step, head, order[token]), dim_ * int(sizeof(elem))};
            const bool is_v = head >= s_.heads + s_.kv_heads;
            return pages_.target(is_v, slots_[token].page, layer, head - s_.heads - (is_v ? s_.kv_heads : 0),
                                 slots_[token].offset);
        };
        multiply<W>(normed(), step.tokens, at.qkv, weights_.head_panels, target,
                    [&](int first, int count, int head, float *product, int worker) {
                        if (!at.qkv_bias.empty())
                            for (int r = 0; r < count; ++r)
                                for (int i = 0; i < dim_; i += VW) {
                                    float *x = product + size_t(r) * wide + i;
                                    store(x, load<vf>(x) + load<vf>(&at.qkv_bias[size_t(head) * wide + i]));
                                }
                        if (head < s_.heads)
                            place_queries(step, layer, head, first, count, product, order);
                        else
                            place_pages(layer, head - s_.heads, first, count, product, scratch_[worker].head);
                    });
    }

    // Where a head of a query lies.
    elem *query_at(const StepArrays &step, int head, int query) const {
        const size_t row = size_t(head / group_) * step.tokens + query;
        return reinterpret_cast<elem *>(queries_ + (row * group_ + head % group_) * (dim_ / P));
    }

    // A head of Q of some tokens, normed and rotated, to the queries.
    void place_queries(const StepArrays &step, int layer, int head, int first, int count, float *product,
                       const std::vector<int> &order) const {
        turn(layer, weights_.layers[layer].q_norm, first, count, product);
        elem *const base = query_at(step, head, 0);
        for (int r = 0; r < count; ++r) {
            const float *x = product + size_t(r) * weights_.head_panels * NR;
            elem *to = base + size_t(order[first + r]) * group_ * dim_;
            for (int i = 0; i < dim_; i += VW) T::put(to + i, load<vf>(x + i));
        }
    }

    // A head of K, normed and rotated, or of V, of some tokens, into their pages; heads of V come after those of K.
    void place_pages(int layer, int head, int first, int count, float *product,
                     std::vector<typename KV::elem> &elems) const {
        const bool is_v = head >= s_.kv_heads;
        if (!is_v) turn(layer, weights_.layers[layer].k_norm, first, count, product);
        elems.resize(dim_);
        for (int r = 0; r < count; ++r)
            pages_.write(is_v, slots_[first + r].page, layer, is_v ? head - s_.kv_heads : head, slots_[first + r].offset,
                         product + size_t(r) * weights_.head_panels * NR, elems.data());
    }

    // Norm, where the model has one there, and rotation of a head of some tokens.
    void turn(int layer, const std::vector<float> &weight, int first, int count, float *product) const {
        const int rope = s_.ropes > 1 && windows_[layer] > 0 ? 1 : 0;
        for (int r = 0; r < count; ++r) {
            float *x = product + size_t(r) * weights_.head_panels * NR;
            if (s_.qk_norm) {
                const vf scale = splat(inverse_rms(x, dim_, s_.head_dim, s_.norm_eps));
                for (int i = 0; i < dim_; i += VW) store(x + i, load<vf>(x + i) * scale * load<vf>(&weight[i]));
            }
            rotate(x, cosines_ + (size_t(first + r) * s_.ropes + rope) * s_.head_dim);
        }
    }

    // Rotary embedding; the two halves of a head are the two coordinates (Su et al. 2021, as Llama lays it out).
    void rotate(float *x, const float *cosine) const {
        const int half = s_.head_dim / 2;
        const float *sine = cosine + half;
        int i = 0;
        for (; i + VW <= half; i += VW) {
            const vf a = load<vf>(x + i), b = load<vf>(x + half + i), c = load<vf>(cosine + i), s = load<vf>(sine + i);
            store(x + i, a * c - b * s);
            store(x + half + i, b * c + a * s);
        }
        for (; i < half; ++i) {
            const float a = x[i], b = x[half + i];
            x[i] = a * cosine[i] - b * sine[i];
            x[half + i] = b * cosine[i] + a * sine[i];
        }
    }

    const AttentionPlan &current_plan(int layer) const { return plans_.at(windows_[layer]); }

    void attend(int layer) {
        const AttentionPlan &plan = current_plan(layer);
        const float cap = s_.attention_cap;
        const Attention<T, KV> attention{plan, pages_, layer, s_.kv_heads, group_, dim_,
                                     (cap > 0.0f ? 1.0f : s_.attention_scale) * LOG2E,
                                     cap, cap > 0.0f ? s_.attention_scale / cap : 0.0f,
                                     queries_, stride(s_.heads * dim_) * P, reinterpret_cast<elem *>(attended_),
                                     partials_};
        pool_.each(int(plan.units.size()) * s_.kv_heads, [&](int i, int worker) {
            attention.run_unit(plan.units[i / s_.kv_heads], i % s_.kv_heads, scratch_[worker].attention);
        });
        pool_.each(int(plan.merged.size()) * s_.kv_heads, [&](int i, int worker) {
            attention.merge_query(plan.merged[i / s_.kv_heads], i % s_.kv_heads, scratch_[worker].attention);
        });
    }

    // After the last layer's attention only the tokens whose logits are wanted go on.
    void keep_only(const StepArrays &step) {
        const ptrdiff_t words = stride(s_.heads * dim_);
        for (int i = 0; i < step.wanted_count; ++i) {
            const int t = step.wanted[i];
            std::memcpy(kept_x_ + size_t(i) * hidden_, x_ + size_t(t) * hidden_, hidden_ * sizeof(float));
            std::memcpy(kept_attended_ + i * words, attended_ + t * words, s_.heads * dim_ / P * sizeof(uint32_t));
        }
        x_ = kept_x_;
        attended_ = kept_attended_;
    }

    // x += a times m (+ bias), through a norm where the model has one there.
    void add_product(const Activations &a, const Matrix &m, const std::vector<float> &bias,
                     const std::vector<float> &post_norm, int rows) {
        const bool direct = post_norm.empty();
        float *const into = direct ? x_ : branch_;
        const auto target = [&](int row, int panel) -> Target {
            return {into + size_t(row) * hidden_ + panel * NR, NR * int(sizeof(float))};
        };
        multiply<W>(a, rows, m, 1, target,
                    [&](int first, int count, int panel, const float *product, int) {
            for (int r = 0; r < count; ++r) {
                float *to = into + size_t(first + r) * hidden_ + panel * NR;
                for (int j = 0; j < NR; j += VW) {
                    vf sum = load<vf>(product + r * NR + j);
                    if (!bias.empty()) sum += load<vf>(&bias[panel * NR + j]);
                    store(to + j, direct ? load<vf>(to + j) + sum : sum);
                }
            }
        });
        if (!direct) add_normed(post_norm, rows);
    }

    // x += RMSNorm of branch_
    void add_normed(const std::vector<float> &weight, int rows) {
        pool_.each((rows + 7) / 8, [&](int block, int) {
            for (int r = block * 8; r < std::min(rows, block * 8 + 8); ++r) {
                const float *from = branch_ + size_t(r) * hidden_;
                float *to = x_ + size_t(r) * hidden_;
                const vf scale = splat(inverse_rms(from, hidden_, s_.hidden, s_.norm_eps));
                for (int i = 0; i < hidden_; i += VW)
                    store(to + i, load<vf>(to + i) + load<vf>(from + i) * scale * load<vf>(&weight[i]));
            }
        });
    }

    // middle_ = SiLU(gate), or GELU, * up: a panel holds VW columns of gate and the same of up.
    void gate_up(const Layer &layer, int rows) {
        const auto target = [&](int row, int panel) -> Target {
            return {reinterpret_cast<elem *>(middle_ + row * stride(mid_)) + panel * VW, VW * int(sizeof(elem))};
        };
        multiply<W>(normed(), rows, layer.gate_up, 1, target,
                 [&](int first, int count, int panel, const float *product, int) {
                     for (int r = 0; r < count; ++r) {
                         vf gate = load<vf>(product + r * NR), up = load<vf>(product + r * NR + VW);
                         if (!layer.gate_up_bias.empty()) {
                             gate += load<vf>(&layer.gate_up_bias[panel * NR]);
                             up += load<vf>(&layer.gate_up_bias[panel * NR + VW]);
                         }
                         elem *to = reinterpret_cast<elem *>(middle_ + (first + r) * stride(mid_)) + panel * VW;
                         T::put(to, (s_.gelu ? gelu(gate) : silu<T::PRECISE>(gate)) * up);
                     }
                 });
    }

    void head(const Activations &hidden, int rows, float *out) {
        // Written once and not soon read.
        const auto target = [&](int, int) -> Target { return {out, 0}; };
        multiply<typename Weights<T, W>::H>(hidden, rows, weights_.head, 1, target,
                 [&](int first, int count, int panel, const float *product, int) {
                     const int n = std::min(NR, s_.vocab - panel * NR);
                     for (int r = 0; r < count; ++r) {
                         float capped[NR];
                         if (s_.final_cap > 0.0f)
                             for (int j = 0; j < NR; j += VW)
                                 store(capped + j, tanhv(load<vf>(product + r * NR + j) * splat(1.0f / s_.final_cap)) *
                                                       splat(s_.final_cap));
                         std::memcpy(out + size_t(first + r) * s_.vocab + panel * NR,
                                     s_.final_cap > 0.0f ? capped : product + r * NR, n * sizeof(float));
                     }
                 });
    }

    const Spec s_;
    ThreadPool pool_;
    const std::vector<float> inverse_frequencies_;
    const std::vector<int> windows_;
    Weights<T, W> weights_;
    const int dim_, group_, hidden_, mid_;
    const PagePool<T, KV> pages_;
    std::vector<Scratch> scratch_;
    std::map<int, AttentionPlan> plans_;  // by window
    struct Slot {
        int page, offset;
    };
    std::vector<Slot> slots_;  // of each token of the step: where its K and V go
    double seconds_[PHASES] = {};
    // What the pointers below point into; grows with the largest step so far.
    struct {
        Memory x, normed, queries, attended, middle, cosines, kept_x, kept_attended, partials, quantized, groups;
        Memory branch;
    } memory_;
    float *x_ = nullptr, *cosines_ = nullptr, *kept_x_ = nullptr, *partials_ = nullptr, *branch_ = nullptr;
    uint32_t *normed_ = nullptr, *queries_ = nullptr, *attended_ = nullptr, *middle_ = nullptr;
    uint32_t *kept_attended_ = nullptr, *quantized_ = nullptr;
    GroupScale *groups_ = nullptr;
};

}  // namespace sapwood
