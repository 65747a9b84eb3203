// The C interface of the kernels, as srt/model/native.py calls it.  Nothing here throws: a failure is a null or -1.
//
// Compiled once for each choice of formats: FORMAT (BF16 or F32) of activations, WEIGHTS (the same, I8 or I4),
// KV_FORMAT (the same, BF16 or I8).
#include "model.h"

using namespace sapwood;
typedef ModelOf<FORMAT, WEIGHTS, KV_FORMAT> Model;

extern "C" {

void *sapwood_create(const Spec *spec) {
    try {
        return new Model(*spec);
    } catch (...) {
        return nullptr;
    }
}

void sapwood_destroy(void *model) { delete static_cast<Model *>(model); }

void sapwood_set_weight(void *model, int32_t layer, int32_t which, const void *from) {
    static_cast<Model *>(model)->weights().set_weight(layer, Weight(which), static_cast<const FORMAT::elem *>(from));
}

void sapwood_set_vector(void *model, int32_t layer, int32_t which, const float *from) {
    static_cast<Model *>(model)->weights().set_vector(layer, Vector(which), from);
}

void sapwood_set_embedding(void *model, const void *from) {
    static_cast<Model *>(model)->weights().embedding = static_cast<const FORMAT::elem *>(from);
}

int32_t sapwood_forward(void *model, const StepArrays *step) {
    try {
        static_cast<Model *>(model)->forward(*step);
        return 0;
    } catch (...) {
        return -1;
    }
}

int32_t sapwood_project(void *model, const void *hidden, int32_t rows, float *out) {
    try {
        static_cast<Model *>(model)->project(static_cast<const FORMAT::elem *>(hidden), rows, out);
        return 0;
    } catch (...) {
        return -1;
    }
}

void sapwood_best(void *model, const float *logits, int32_t rows, int32_t *out) {
    static_cast<Model *>(model)->best(logits, rows, out);
}

void sapwood_greedy(void *model, const float *logits, const int32_t *rows, int32_t count, int32_t *out) {
    static_cast<Model *>(model)->greedy(logits, rows, count, out);
}

int32_t sapwood_draw(void *model, const float *logits, const DrawRow *rows, int32_t count, int32_t *out) {
    try {
        static_cast<Model *>(model)->draw(logits, rows, count, out);
        return 0;
    } catch (...) {
        return -1;
    }
}

void sapwood_take_seconds(void *model, double *seconds) { static_cast<Model *>(model)->take_seconds(seconds); }

void sapwood_peaks(void *model, double *operations, double *bytes) {
    static_cast<Model *>(model)->peaks(operations, bytes);
}

// Copies the first rows of pages: `copies` is [count][3] of source page, destination page, rows.
void sapwood_copy_rows(void *kv, int32_t page_size, int32_t layers, int32_t kv_heads, int32_t head_dim,
                       const int32_t *copies, int32_t count) {
    const PagePool<FORMAT, KV_FORMAT> pool(kv, page_size, layers, kv_heads, round_up(head_dim, STRIP));
    for (int i = 0; i < count; ++i) pool.copy_rows(copies[3 * i], copies[3 * i + 1], copies[3 * i + 2]);
}
}
