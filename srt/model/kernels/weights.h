// A model's weights as the products take them: packed, in one stretch of memory, in the order of use.
#pragma once

#include "int4.h"
#include "memory.h"
#include "pages.h"
#include "threads.h"

namespace sapwood {

// The shape of a model and where its KV pool lies; the same fields in the same order as in srt/model/native.py.
struct Spec {
    int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab;
    int32_t num_pages, page_size, threads;
    int32_t qk_norm, gelu, ropes;
    float norm_eps, rope_scale, attention_scale, embedding_scale;
    float attention_cap, final_cap;    // 0: none
    const float *inverse_frequencies;  // [ropes][head_dim / 2]: of layers without and, where there are 2, with a window
    const int32_t *windows;            // [layers]; 0: the layer sees everything before a token
    void *kv;
};

enum Weight : int32_t { Q = 0, K = 1, V = 2, O = 3, GATE = 4, UP = 5, DOWN = 6, HEAD = 7 };
enum Vector : int32_t {
    ATTENTION_NORM = 0, MLP_NORM = 1, FINAL_NORM = 2, Q_NORM = 3, K_NORM = 4,
    Q_BIAS = 5, K_BIAS = 6, V_BIAS = 7, O_BIAS = 8, GATE_BIAS = 9, UP_BIAS = 10, DOWN_BIAS = 11,
    ATTENTION_POST_NORM = 12, MLP_POST_NORM = 13
};

constexpr int row_below(int c, int n) { return c < n ? c : -1; }

// T: the number format that the weights come in.  W: that of the packed ones, T, I8 or I4.  H: that of the head's, W or
// I8: logits suffer more from 4 bits than all layers together.
//
// Columns of Q, K and V go head by head, each head in panels of its own; a panel of gate and up holds VW columns of the
// one and the same VW of the other.
template <class T, class W>
class Weights {
    typedef typename T::elem elem;
    static constexpr bool QUANTIZED = !std::is_same<T, W>::value;

  public:
    typedef std::conditional_t<std::is_same<W, I4>::value, I8, W> H;

    struct Layer {
        Matrix qkv, o, gate_up, down;
        std::vector<float> attention_norm, mlp_norm, q_norm, k_norm, qkv_bias, o_bias, gate_up_bias, down_bias;
        std::vector<float> attention_post_norm, mlp_post_norm;  // empty where there are none
    };

    Weights(const Spec &spec, ThreadPool &pool)
        : dim(round_up(spec.head_dim, STRIP)), head_panels((dim + NR - 1) / NR), hidden(round_up(spec.hidden, NR)),
          mid(round_up(spec.intermediate, NR)), layers(spec.layers), final_norm(hidden), s_(spec), pool_(pool) {
        lay_out();
    }

    // Sizes as stored: of a head (whole strips), of the rows of activations (whole panels).
    const int dim, head_panels, hidden, mid;
    std::vector<Layer> layers;
    std::vector<float> final_norm;
    Matrix head;
    const elem *embedding = nullptr;

    const uint32_t *words() { return memory_.template need<uint32_t>(0); }
    size_t word_count() const { return word_count_; }

    void set_weight(int layer, Weight which, const elem *from) {
        Layer *at = which == HEAD ? nullptr : &layers[layer];
        const int d = s_.head_dim;
        switch (which) {
            case Q: return pack_heads(at->qkv, 0, s_.heads, from);
            case K: return pack_heads(at->qkv, s_.heads, s_.kv_heads, from);
            case V: return pack_heads(at->qkv, s_.heads + s_.kv_heads, s_.kv_heads, from);
            case O:
                return pack<W>(at->o, from, s_.heads * d, d, dim, [&](int c) { return row_below(c, s_.hidden); });
            case GATE: return pack_half(at->gate_up, 0, from);
            case UP: return pack_half(at->gate_up, 1, from);
            case DOWN:
                return pack<W>(at->down, from, s_.intermediate, s_.intermediate, s_.intermediate,
                            [&](int c) { return row_below(c, s_.hidden); });
            case HEAD:
                return pack<H>(head, from, s_.hidden, s_.hidden, s_.hidden,
                               [&](int c) { return row_below(c, s_.vocab); });
        }
    }

    void set_vector(int layer, Vector which, const float *from) {
        Layer *at = which == FINAL_NORM ? nullptr : &layers[layer];
        const int d = s_.head_dim, wide = head_panels * NR;
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
            at->gate_up_bias.resize(size_t(mid) * 2);
            for (int i = 0; i < s_.intermediate; ++i)
                at->gate_up_bias[i / VW * NR + which_half * VW + i % VW] = from[i];
        };
        switch (which) {
            case ATTENTION_NORM: return plain(at->attention_norm, s_.hidden, hidden);
            case MLP_NORM: return plain(at->mlp_norm, s_.hidden, hidden);
            case FINAL_NORM: return plain(final_norm, s_.hidden, hidden);
            case Q_NORM: return plain(at->q_norm, d, dim);
            case K_NORM: return plain(at->k_norm, d, dim);
            case Q_BIAS: return heads(0, s_.heads);
            case K_BIAS: return heads(s_.heads, s_.kv_heads);
            case V_BIAS: return heads(s_.heads + s_.kv_heads, s_.kv_heads);
            case O_BIAS: return plain(at->o_bias, s_.hidden, hidden);
            case GATE_BIAS: return half(0);
            case UP_BIAS: return half(1);
            case DOWN_BIAS: return plain(at->down_bias, s_.hidden, hidden);
            case ATTENTION_POST_NORM: return plain(at->attention_post_norm, s_.hidden, hidden);
            case MLP_POST_NORM: return plain(at->mlp_post_norm, s_.hidden, hidden);
        }
    }

  private:
    int all_heads() const { return s_.heads + 2 * s_.kv_heads; }

    void lay_out() {
        const auto shape = [](auto format, int k, int columns) {
            typedef decltype(format) F;
            Matrix m;
            m.steps = (k + F::PER_WORD - 1) / F::PER_WORD;
            if (std::is_same<F, I4>::value) m.steps = round_up(m.steps, I4::SPAN_WORDS);
            m.stored = stored_rows<F>(m.steps);
            m.panels = (columns + NR - 1) / NR;
            return m;
        };
        std::vector<Matrix *> all;
        for (auto &layer : layers) {
            layer.qkv = shape(W{}, s_.hidden, all_heads() * head_panels * NR);
            layer.o = shape(W{}, s_.heads * dim, s_.hidden);
            layer.gate_up = shape(W{}, s_.hidden, 2 * round_up(s_.intermediate, VW));
            layer.down = shape(W{}, s_.intermediate, s_.hidden);
            for (Matrix *m : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) all.push_back(m);
            layer.attention_norm.resize(hidden);
            layer.mlp_norm.resize(hidden);
            layer.q_norm.resize(dim);
            layer.k_norm.resize(dim);
        }
        head = shape(H{}, s_.hidden, s_.vocab);
        all.push_back(&head);
        size_t size = 0;
        for (const Matrix *m : all) size += m->size();
        word_count_ = size;
        uint32_t *at = memory_.template need<uint32_t>(size);
        for (Matrix *m : all) {
            m->words = at;
            at += m->size();
            if (QUANTIZED) m->scale.resize(size_t(m->panels) * NR);
        }
    }

    template <class F, class R>
    void pack(Matrix &m, const elem *from, int k, int group, int spread, const R &row_of) {
        pool_.each(m.panels, [&](int p, int) {
            const elem *rows[NR];
            for (int c = 0; c < NR; ++c) {
                const int row = row_of(p * NR + c);
                rows[c] = row < 0 ? nullptr : from + size_t(row) * k;
            }
            if constexpr (std::is_same<F, I4>::value)
                quantize_panel_spans<T>(rows, k, group, spread, m, p);
            else if constexpr (std::is_same<F, I8>::value)
                quantize_panel<T>(rows, k, group, spread, m, p);
            else
                pack_panel<T>(rows, k, group, spread, m.steps, m.panel(p));
        });
    }

    void pack_heads(Matrix &m, int first, int count, const elem *from) {
        const int wide = head_panels * NR, d = s_.head_dim;
        pack<W>(m, from, s_.hidden, s_.hidden, s_.hidden, [&](int c) {
            const int h = c / wide - first, i = c % wide;
            return h >= 0 && h < count && i < d ? h * d + i : -1;
        });
    }

    void pack_half(Matrix &m, int half, const elem *from) {
        pack<W>(m, from, s_.hidden, s_.hidden, s_.hidden, [&](int c) {
            const int i = c / NR * VW + c % VW;
            return c % NR / VW == half && i < s_.intermediate ? i : -1;
        });
    }

    const Spec s_;
    ThreadPool &pool_;
    Memory memory_;
    size_t word_count_ = 0;
};

}  // namespace sapwood
