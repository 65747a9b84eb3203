// A decoder-only transformer: its packed weights, and one step through all of its layers.
#pragma once

#include <sys/mman.h>

#include <map>
#include <memory>
#include <type_traits>
#include <string>

#include "attention.h"
#include "measure.h"
#include "threads.h"

namespace sapwood {

// The shape of a model and where its KV pool lies; the same fields in the same order as in srt/model/native.py.
struct Spec {
    int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab;
    int32_t num_pages, page_size, threads;
    int32_t qk_norm;
    float norm_eps, rope_scale, attention_scale;
    const float *inverse_frequencies;  // [head_dim / 2]
    const int32_t *windows;            // [layers]; 0: the layer sees everything before a token
    void *kv;
};

enum Weight : int32_t { Q = 0, K = 1, V = 2, O = 3, GATE = 4, UP = 5, DOWN = 6, HEAD = 7 };
enum Vector : int32_t {
    ATTENTION_NORM = 0, MLP_NORM = 1, FINAL_NORM = 2, Q_NORM = 3, K_NORM = 4,
    Q_BIAS = 5, K_BIAS = 6, V_BIAS = 7, O_BIAS = 8, GATE_BIAS = 9, UP_BIAS = 10, DOWN_BIAS = 11
};

// The parts of a step whose time is kept.
enum Phase { PREPARE, NORM, QKV, ATTENTION, OUTPUT, GATE_UP, DOWN_PHASE, HEAD_PHASE, PHASES };

// Memory in huge pages where the system gives them, zero at first, aligned to a page.
class Memory {
  public:
    Memory() = default;
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    ~Memory() { release(); }

    // At least `bytes` bytes; what was there before is lost when it grows.
    template <class E>
    E *need(size_t count) {
        const size_t bytes = count * sizeof(E) + 4096;
        if (bytes > size_) {
            release();
            void *got = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (got == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
            madvise(got, bytes, MADV_HUGEPAGE);
#endif
            at_ = got;
            size_ = bytes;
        }
        return static_cast<E *>(at_);
    }

  private:
    void release() {
        if (at_) munmap(at_, size_);
        at_ = nullptr;
        size_ = 0;
    }
    void *at_ = nullptr;
    size_t size_ = 0;
};

// T: the number format of activations and KV.  W: that of the packed weights, T or I8.
template <class T, class W>
class ModelOf {
    typedef typename T::elem elem;
    static constexpr int P = T::PER_WORD;
    static constexpr bool QUANTIZED = !std::is_same<T, W>::value;

    struct Layer {
        Matrix qkv, o, gate_up, down;
        std::vector<float> attention_norm, mlp_norm, q_norm, k_norm, qkv_bias, o_bias, gate_up_bias, down_bias;
    };

  public:
    explicit ModelOf(const Spec &spec)
        : s_(spec), pool_(spec.threads),
          inverse_frequencies_(spec.inverse_frequencies, spec.inverse_frequencies + spec.head_dim / 2),
          windows_(spec.windows, spec.windows + spec.layers), dim_(round_up(spec.head_dim, STRIP)),
          group_(spec.heads / spec.kv_heads), head_panels_((dim_ + NR - 1) / NR),
          hidden_(round_up(spec.hidden, NR)), mid_(round_up(spec.intermediate, NR)),
          pages_(spec.kv, spec.page_size, spec.layers, spec.kv_heads, dim_), layers_(spec.layers),
          scratch_(pool_.size()) {
        lay_out_weights();
        final_norm_.resize(hidden_);
        for (auto &scratch : scratch_) scratch.attention.prepare(group_, dim_);
    }

    void set_weight(int layer, Weight which, const elem *from) {
        Layer *at = which == HEAD ? nullptr : &layers_[layer];
        const int d = s_.head_dim;
        switch (which) {
            case Q: return pack_heads(at->qkv, 0, s_.heads, from);
            case K: return pack_heads(at->qkv, s_.heads, s_.kv_heads, from);
            case V: return pack_heads(at->qkv, s_.heads + s_.kv_heads, s_.kv_heads, from);
            case O:
                return pack(at->o, from, s_.heads * d, d, dim_, [&](int c) { return below(c, s_.hidden); });
            case GATE: return pack_half(at->gate_up, 0, from);
            case UP: return pack_half(at->gate_up, 1, from);
            case DOWN:
                return pack(at->down, from, s_.intermediate, s_.intermediate, s_.intermediate, [&](int c) { return below(c, s_.hidden); });
            case HEAD:
                return pack(head_, from, s_.hidden, s_.hidden, s_.hidden, [&](int c) { return below(c, s_.vocab); });
        }
    }

    void set_vector(int layer, Vector which, const float *from) {
        Layer *at = which == FINAL_NORM ? nullptr : &layers_[layer];
        const int d = s_.head_dim, wide = head_panels_ * NR;
        const auto plain = [&](std::vector<float> &to, int n, int padded) {
            to.assign(padded, 0.0f);
            std::copy(from, from + n, to.begin());
        };
        const auto heads = [&](int first, int count) {
            at->qkv_bias.resize(size_t(all_heads()) * wide);
            for (int h = 0; h < count; ++h)
                std::copy(from + h * d, from + (h + 1) * d, at->qkv_bias.begin() + (first + h) * wide);
        };
        const auto half = [&](int which_half) {
            at->gate_up_bias.resize(size_t(mid_) * 2);
            for (int i = 0; i < s_.intermediate; ++i)
                at->gate_up_bias[i / VW * NR + which_half * VW + i % VW] = from[i];
        };
        switch (which) {
            case ATTENTION_NORM: return plain(at->attention_norm, s_.hidden, hidden_);
            case MLP_NORM: return plain(at->mlp_norm, s_.hidden, hidden_);
            case FINAL_NORM: return plain(final_norm_, s_.hidden, hidden_);
            case Q_NORM: return plain(at->q_norm, d, dim_);
            case K_NORM: return plain(at->k_norm, d, dim_);
            case Q_BIAS: return heads(0, s_.heads);
            case K_BIAS: return heads(s_.heads, s_.kv_heads);
            case V_BIAS: return heads(s_.heads + s_.kv_heads, s_.kv_heads);
            case O_BIAS: return plain(at->o_bias, s_.hidden, hidden_);
            case GATE_BIAS: return half(0);
            case UP_BIAS: return half(1);
            case DOWN_BIAS: return plain(at->down_bias, s_.hidden, hidden_);
        }
    }

    void set_embedding(const elem *from) {
        embedding_ = from;
    }

    void forward(const StepArrays &step) {
        timed(PREPARE, [&] {
            prepare(step);
            embed(step);
        });
        for (int layer = 0; layer < s_.layers; ++layer) {
            const Layer &at = layers_[layer];
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
            timed(OUTPUT, [&] { add_product(ready(attended_, s_.heads * dim_, rows), at.o, at.o_bias, rows); });
            timed(NORM, [&] { norm(x_, at.mlp_norm, rows); });
            timed(GATE_UP, [&] { gate_up(at, rows); });
            timed(DOWN_PHASE, [&] { add_product(ready(middle_, mid_, rows), at.down, at.down_bias, rows); });
        }
        timed(NORM, [&] { norm(x_, final_norm_, step.wanted_count); });
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
        *bytes = read_bandwidth(pool_, weights_.template need<uint32_t>(0), weight_words_);
    }

    void project(const elem *hidden, int rows, float *out) {
        uint32_t *words = memory_[1].template need<uint32_t>(size_t(rows) * stride(hidden_));
        for (int i = 0; i < rows; ++i) {
            uint32_t *to = words + i * stride(hidden_);
            std::fill(to, to + hidden_ / P, 0);
            std::memcpy(to, hidden + size_t(i) * s_.hidden, s_.hidden * sizeof(elem));
        }
        need_quantized(rows, hidden_);
        head(ready(words, hidden_, rows), rows, out);
    }

  private:
    struct Scratch {
        AttentionScratch attention;
        std::vector<float> product;
        std::vector<elem> head;
    };

    template <class F>
    void timed(Phase phase, const F &f) {
        const double begin = now();
        f();
        seconds_[phase] += now() - begin;
    }

    static int below(int c, int n) { return c < n ? c : -1; }
    int all_heads() const { return s_.heads + 2 * s_.kv_heads; }

    // Words from one row of activations to the next; not a multiple of 1 KB, where rows would share cache sets.
    static ptrdiff_t stride(int elems) {
        const int words = elems / P;
        return words % 256 == 0 ? words + 16 : words;
    }

    void lay_out_weights() {
        const auto shape = [](int k, int columns) {
            Matrix m;
            m.steps = (k + W::PER_WORD - 1) / W::PER_WORD;
            m.panels = (columns + NR - 1) / NR;
            return m;
        };
        std::vector<Matrix *> all;
        for (auto &layer : layers_) {
            layer.qkv = shape(s_.hidden, all_heads() * head_panels_ * NR);
            layer.o = shape(s_.heads * dim_, s_.hidden);
            layer.gate_up = shape(s_.hidden, 2 * round_up(s_.intermediate, VW));
            layer.down = shape(s_.intermediate, s_.hidden);
            for (Matrix *m : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) all.push_back(m);
            layer.attention_norm.resize(hidden_);
            layer.mlp_norm.resize(hidden_);
            layer.q_norm.resize(dim_);
            layer.k_norm.resize(dim_);
        }
        head_ = shape(s_.hidden, s_.vocab);
        all.push_back(&head_);
        size_t size = 0;
        for (const Matrix *m : all) size += m->size();
        weight_words_ = size;
        uint32_t *at = weights_.template need<uint32_t>(size);
        for (Matrix *m : all) {
            m->words = at;
            at += m->size();
            if (QUANTIZED) m->scale.resize(size_t(m->panels) * NR);
        }
    }

    template <class F>
    void pack(Matrix &m, const elem *from, int k, int group, int spread, const F &row_of) {
        pool_.each(m.panels, [&](int p, int) {
            const elem *rows[NR];
            for (int c = 0; c < NR; ++c) {
                const int row = row_of(p * NR + c);
                rows[c] = row < 0 ? nullptr : from + size_t(row) * k;
            }
            if constexpr (QUANTIZED)
                quantize_panel<T>(rows, k, group, spread, m, p);
            else
                pack_panel<T>(rows, k, group, spread, m.steps, m.words + size_t(p) * m.steps * NR);
        });
    }

    void pack_heads(Matrix &m, int first, int count, const elem *from) {
        const int wide = head_panels_ * NR, d = s_.head_dim;
        pack(m, from, s_.hidden, s_.hidden, s_.hidden, [&](int c) {
            const int h = c / wide - first, i = c % wide;
            return h >= 0 && h < count && i < d ? h * d + i : -1;
        });
    }

    void pack_half(Matrix &m, int half, const elem *from) {
        pack(m, from, s_.hidden, s_.hidden, s_.hidden, [&](int c) {
            const int i = c / NR * VW + c % VW;
            return c % NR / VW == half && i < s_.intermediate ? i : -1;
        });
    }

    void prepare(const StepArrays &step) {
        const size_t n = std::max(step.tokens, step.wanted_count);
        x_ = memory_[0].template need<float>(n * hidden_);
        normed_ = memory_[1].template need<uint32_t>(n * stride(hidden_));
        queries_ = memory_[2].template need<uint32_t>(n * s_.heads * dim_ / P);
        attended_ = memory_[3].template need<uint32_t>(n * stride(s_.heads * dim_));
        middle_ = memory_[4].template need<uint32_t>(n * stride(mid_));
        cosines_ = memory_[5].template need<float>(n * s_.head_dim);
        kept_x_ = memory_[6].template need<float>(size_t(step.wanted_count) * hidden_);
        kept_attended_ = memory_[7].template need<uint32_t>(size_t(step.wanted_count) * stride(s_.heads * dim_));
        need_quantized(n, std::max({hidden_, mid_, s_.heads * dim_}));
        plans_.clear();
        size_t partials = 0;
        for (int window : windows_)
            if (!plans_.count(window)) {
                plans_[window].make(step, s_.page_size, s_.kv_heads, group_, window, pool_.size());
                partials = std::max(partials, size_t(plans_[window].partials));
            }
        partials_ = memory_[8].template need<float>(partials * s_.heads * (dim_ + 2));
    }

    void embed(const StepArrays &step) {
        const int half = s_.head_dim / 2;
        pool_.each((step.tokens + 7) / 8, [&](int block, int) {
            for (int t = block * 8; t < std::min(step.tokens, block * 8 + 8); ++t) {
                const size_t from = size_t(step.token_ids[t]) * s_.hidden;
                float *x = x_ + size_t(t) * hidden_;
                std::fill(x + s_.hidden, x + hidden_, 0.0f);
                for (int i = 0; i < s_.hidden; ++i) x[i] = T::get(embedding_[from + i]);
                float *cosine = cosines_ + size_t(t) * s_.head_dim;
                for (int i = 0; i < half; ++i) {
                    const float angle = float(step.positions[t]) * inverse_frequencies_[i];
                    cosine[i] = std::cos(angle) * s_.rope_scale;
                    cosine[half + i] = std::sin(angle) * s_.rope_scale;
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
        quantized_ = memory_[9].template need<uint32_t>(rows * quantized_stride(columns));
        groups_ = memory_[10].template need<GroupScale>(rows * groups_of(columns));
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

    // For every group of `wide` panels and every chunk of rows: the product, then finish(first row, rows, group, product).
    template <class F>
    void multiply(const Activations &a, int rows, const Matrix &m, int wide, const F &finish) {
        if (rows == 0) return;
        const int chunk = rows_of_unit(rows, m.steps), chunks = (rows + chunk - 1) / chunk, groups = m.panels / wide;
        const int columns = wide * NR;
        pool_.each(chunks * groups, [&](int unit, int worker) {
            const int first = unit / groups * chunk, count = std::min(chunk, rows - first), group = unit % groups;
            auto &product = scratch_[worker].product;
            if (product.size() < size_t(count) * columns) product.resize(size_t(count) * columns);
            for (int p = 0; p < wide; ++p)
                multiply_panel<W>(a.from(first, 0, W::GROUP), count, m, group * wide + p, product.data() + p * NR,
                                  columns);
            finish(first, count, group, product.data(), worker);
        });
    }

    void project_qkv(const StepArrays &step, int layer) {
        const Layer &at = layers_[layer];
        const int wide = head_panels_ * NR;
        multiply(normed(), step.tokens, at.qkv, head_panels_,
                 [&](int first, int count, int head, float *product, int worker) {
                     auto &elems = scratch_[worker].head;
                     elems.resize(dim_);
                     for (int r = 0; r < count; ++r) {
                         float *x = product + size_t(r) * wide;
                         if (!at.qkv_bias.empty())
                             for (int i = 0; i < dim_; i += VW)
                                 store(x + i, load<vf>(x + i) + load<vf>(&at.qkv_bias[size_t(head) * wide + i]));
                         place_head(step, layer, head, first + r, x, elems.data());
                     }
                 });
    }

    // One head of one token: norm and rotation where it is Q or K, then to the queries or into the page.
    void place_head(const StepArrays &step, int layer, int head, int token, float *x, elem *elems) {
        const Layer &at = layers_[layer];
        const bool is_q = head < s_.heads, is_v = head >= s_.heads + s_.kv_heads;
        if (!is_v) {
            if (s_.qk_norm) {
                const auto &weight = is_q ? at.q_norm : at.k_norm;
                const vf scale = splat(inverse_rms(x, dim_, s_.head_dim, s_.norm_eps));
                for (int i = 0; i < dim_; i += VW) store(x + i, load<vf>(x + i) * scale * load<vf>(&weight[i]));
            }
            rotate(x, cosines_ + size_t(token) * s_.head_dim);
        }
        if (is_q) {
            const size_t row = size_t(head / group_) * step.tokens + current_plan(layer).order[token];
            elem *to = reinterpret_cast<elem *>(queries_ + (row * group_ + head % group_) * (dim_ / P));
            for (int i = 0; i < dim_; i += VW) T::put(to + i, load<vf>(x + i));
            return;
        }
        for (int i = 0; i < dim_; i += VW) T::put(elems + i, load<vf>(x + i));
        const int page = step.out_slots[token] / s_.page_size, offset = step.out_slots[token] % s_.page_size;
        if (is_v)
            pages_.write_v(page, layer, head - s_.heads - s_.kv_heads, offset, elems);
        else
            pages_.write_k(page, layer, head - s_.heads, offset, elems);
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
        const Attention<T> attention{plan, pages_, layer, s_.kv_heads, group_, dim_, s_.attention_scale * LOG2E,
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

    // x += a times m (+ bias)
    void add_product(const Activations &a, const Matrix &m, const std::vector<float> &bias, int rows) {
        multiply(a, rows, m, 1, [&](int first, int count, int panel, const float *product, int) {
            for (int r = 0; r < count; ++r) {
                float *to = x_ + size_t(first + r) * hidden_ + panel * NR;
                for (int j = 0; j < NR; j += VW) {
                    vf sum = load<vf>(product + r * NR + j);
                    if (!bias.empty()) sum += load<vf>(&bias[panel * NR + j]);
                    store(to + j, load<vf>(to + j) + sum);
                }
            }
        });
    }

    // middle_ = SiLU(gate) * up: a panel holds VW columns of gate and the same of up.
    void gate_up(const Layer &layer, int rows) {
        multiply(normed(), rows, layer.gate_up, 1,
                 [&](int first, int count, int panel, const float *product, int) {
                     for (int r = 0; r < count; ++r) {
                         vf gate = load<vf>(product + r * NR), up = load<vf>(product + r * NR + VW);
                         if (!layer.gate_up_bias.empty()) {
                             gate += load<vf>(&layer.gate_up_bias[panel * NR]);
                             up += load<vf>(&layer.gate_up_bias[panel * NR + VW]);
                         }
                         elem *to = reinterpret_cast<elem *>(middle_ + (first + r) * stride(mid_)) + panel * VW;
                         T::put(to, silu(gate) * up);
                     }
                 });
    }

    void head(const Activations &hidden, int rows, float *out) {
        multiply(hidden, rows, head_, 1,
                 [&](int first, int count, int panel, const float *product, int) {
                     const int n = std::min(NR, s_.vocab - panel * NR);
                     for (int r = 0; r < count; ++r)
                         std::memcpy(out + size_t(first + r) * s_.vocab + panel * NR, product + r * NR,
                                     n * sizeof(float));
                 });
    }

    const Spec s_;
    ThreadPool pool_;
    const std::vector<float> inverse_frequencies_;
    const std::vector<int> windows_;
    const int dim_, group_, head_panels_, hidden_, mid_;
    const PagePool<T> pages_;
    std::vector<Layer> layers_;
    std::vector<Scratch> scratch_;
    std::vector<float> final_norm_;
    Matrix head_;
    Memory weights_, memory_[11];
    size_t weight_words_ = 0;
    double seconds_[PHASES] = {};
    std::map<int, AttentionPlan> plans_;
    const elem *embedding_ = nullptr;
    float *x_ = nullptr, *cosines_ = nullptr, *kept_x_ = nullptr, *partials_ = nullptr;
    uint32_t *normed_ = nullptr, *queries_ = nullptr, *attended_ = nullptr, *middle_ = nullptr;
    uint32_t *kept_attended_ = nullptr, *quantized_ = nullptr;
    GroupScale *groups_ = nullptr;
};

}  // namespace sapwood
