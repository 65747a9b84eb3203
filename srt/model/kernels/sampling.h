// Choosing tokens from logits: greedy, and by temperature, top-k, top-p and min-p, as srt/model/draw.py states it.
//
// A row is the work of one worker, in an order that follows from the vocabulary's size alone, so its token depends on
// nothing but its own logits, settings and number.  Chances are relative to the greatest, which is 1: filters and the
// draw ask only for their ratios.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "simd.h"

namespace sapwood {

typedef double vd __attribute__((vector_size(VW * 4)));
typedef float vhalf __attribute__((vector_size(VW * 2)));

// One row to draw from; the same fields in the same order as in srt/model/native_sampling.py.
struct DrawRow {
    int32_t row, top_k;  // top_k: the vocabulary's size or more for off
    float temperature, min_p;
    double top_p, uniform;  // uniform: in (0, 1)
};

// Whether all of x[n] are finite.
inline bool all_finite(const float *x, int n) {
    vf poison{};
    int i = 0;
    for (; i + VW <= n; i += VW) poison = fma(load<vf>(x + i), vf{}, poison);
    float rest = sum_lanes(poison);
    for (; i < n; ++i) rest += x[i] * 0.0f;
    return rest == 0.0f;
}

inline float greatest(const float *x, int n) {
    vf most = splat(-std::numeric_limits<float>::infinity());
    int i = 0;
    for (; i + VW <= n; i += VW) most = max(load<vf>(x + i), most);
    float found = max_lanes(most);
    for (; i < n; ++i) found = x[i] > found ? x[i] : found;
    return found;
}

// The first place of the greatest of x[n]; none of them is not-a-number.
inline int32_t first_greatest(const float *x, int n) {
    const float most = greatest(x, n);
    return int32_t(std::find(x, x + n, most) - x);
}

// What one worker needs to draw.
class Drawer {
  public:
    int32_t draw(const float *logits, int n, const DrawRow &row) {
        chances_.resize((n + BLOCK - 1) / BLOCK * BLOCK);
        weigh(logits, n, row.temperature);
        return invert(n, std::max(mass_floor(n, row), row.min_p), row.uniform);
    }

  private:
    static constexpr int BLOCK = 128;
    // The upper half of a chance's bits orders buckets of like size; 1.0f is in the last.
    static constexpr int BUCKETS = (0x3f800000 >> 16) + 1;

    // What is no chance (not-a-number, above 1) goes to the last bucket, so that no input leads out of the tables.
    static int bucket(float chance) {
        uint32_t bits;
        std::memcpy(&bits, &chance, sizeof bits);
        return std::min(int(bits >> 16), BUCKETS - 1);
    }

    void weigh(const float *logits, int n, float temperature) {
        const vf most = splat(greatest(logits, n)), divisor = splat(temperature), log2e = splat(LOG2E);
        int i = 0;
        for (; i + VW <= n; i += VW) store(&chances_[i], exp2v((load<vf>(logits + i) - most) / divisor * log2e));
        for (; i < int(chances_.size()); ++i)
            chances_[i] = i < n ? exp2v((splat(logits[i]) - most) / divisor * log2e)[0] : 0.0f;
    }

    // The least chance that passes top-k and top-p.
    float mass_floor(int n, const DrawRow &row) {
        const bool by_rank = row.top_k < n, by_mass = row.top_p < 1.0;
        if (!by_rank && !by_mass) return 0.0f;
        count_.assign(BUCKETS, 0);
        mass_.assign(BUCKETS, 0.0);
        for (int i = 0; i < n; ++i) {
            const int b = bucket(chances_[i]);
            ++count_[b];
            mass_[b] += chances_[i];
        }
        float floor = 0.0f;
        int last = 0;  // the lowest bucket that top-k leaves something of
        if (by_rank) {
            int rank = std::max(1, row.top_k);
            for (last = BUCKETS - 1; count_[last] < rank; --last) rank -= count_[last];
            gather(n, last);
            floor = gathered_[rank - 1];
            mass_[last] = 0.0;
            for (float chance : gathered_)
                if (chance >= floor) mass_[last] += chance;
        }
        if (!by_mass) return floor;
        double all = 0.0, above = 0.0;
        for (int b = BUCKETS - 1; b >= last; --b) all += mass_[b];
        const double needed = row.top_p * all;
        int b = BUCKETS - 1;
        for (; b > last && above + mass_[b] < needed; --b) above += mass_[b];
        gather(n, b);
        for (float chance : gathered_) {
            if (chance < floor) break;
            above += chance;
            if (above >= needed) return chance;
        }
        // Rounding may leave the running sum a little short at its end.
        return b == last ? std::max(floor, gathered_.back()) : gathered_.back();
    }

    // The chances of one bucket in falling order.
    void gather(int n, int b) {
        gathered_.clear();
        for (int i = 0; i < n; ++i)
            if (bucket(chances_[i]) == b) gathered_.push_back(chances_[i]);
        std::sort(gathered_.begin(), gathered_.end(), [](float x, float y) { return x > y; });
    }

    // The first place at which the running sum of the chances not below `floor` exceeds `uniform` of their whole sum.
    int32_t invert(int n, float floor, double uniform) {
        const int blocks = int(chances_.size()) / BLOCK;
        ends_.resize(blocks);
        double all = 0.0;
        for (int b = 0; b < blocks; ++b) ends_[b] = all += block_sum(&chances_[size_t(b) * BLOCK], floor);
        const double target = uniform * all;
        const int b = std::min(int(std::upper_bound(ends_.begin(), ends_.end(), target) - ends_.begin()), blocks - 1);
        double sum = b > 0 ? ends_[b - 1] : 0.0;
        int32_t chosen = b * BLOCK;
        for (int i = b * BLOCK; i < std::min(n, (b + 1) * BLOCK); ++i) {
            if (chances_[i] < floor || chances_[i] == 0.0f) continue;
            chosen = i;
            sum += chances_[i];
            // The block's sum was rounded along another path: where this one falls short of it, the last one is meant.
            if (sum > target) break;
        }
        return chosen;
    }

    static double block_sum(const float *from, float floor) {
        vd sum[2] = {};
        const vf least = splat(floor);
        for (int i = 0; i < BLOCK; i += VW) {
            const vf x = load<vf>(from + i), kept = x >= least ? x : vf{};
            vhalf half[2];
            std::memcpy(half, &kept, sizeof kept);
            sum[0] += __builtin_convertvector(half[0], vd);
            sum[1] += __builtin_convertvector(half[1], vd);
        }
        const vd both = sum[0] + sum[1];
        double all = 0.0;
        for (int lane = 0; lane < VW / 2; ++lane) all += both[lane];
        return all;
    }

    std::vector<float> chances_, gathered_;
    std::vector<int> count_;
    std::vector<double> mass_, ends_;
};

}  // namespace sapwood
