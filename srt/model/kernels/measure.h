// What the machine can do at best, for benchmarks to hold the kernels against: dot products of registers, and
// memory read from front to back.
#pragma once

#include <chrono>

#include "gemm.h"
#include "threads.h"

namespace sapwood {

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Multiply-and-add operations per second over all threads (an addition and a multiplication count as two).
template <class T>
double peak_operations(ThreadPool &pool, int rounds) {
    std::vector<float> kept(pool.size());
    const double begin = now();
    pool.each(pool.size(), [&](int unit, int) {
        typename T::sum sum[2 * MR];
#pragma GCC unroll 24
        for (int j = 0; j < 2 * MR; ++j) {
            sum[j] = typename T::sum{};
            sum[j][0] = j;  // alike sums would be computed once
        }
        vu a = splat_word(0x3f803f80u), b = splat_word(0x3f003f00u);
        for (int i = 0; i < rounds; ++i) {
            // As if they were new each time, so that nothing is computed ahead.
#if defined(__x86_64__)
            asm volatile("" : "+v"(a), "+v"(b));
#elif defined(__aarch64__)
            asm volatile("" : "+w"(a), "+w"(b));
#endif
#pragma GCC unroll 24
            for (int j = 0; j < 2 * MR; ++j) sum[j] = T::dot(sum[j], a, b);
        }
#pragma GCC unroll 24
        for (int j = 0; j < 2 * MR; ++j) kept[unit] += float(sum[j][0]);
    });
    const double seconds = now() - begin;
    volatile float sink = kept[0];
    (void)sink;
    return 2.0 * T::PER_WORD * VW * 2 * MR * rounds * pool.size() / seconds;
}

// Bytes per second that all threads together read out of `words` words.
inline double read_bandwidth(ThreadPool &pool, const uint32_t *words, size_t count) {
    constexpr int PIECE = 1 << 18;
    std::vector<uint32_t> kept(pool.size() * 16);
    const double begin = now();
    pool.each(int(count / PIECE), [&](int unit, int worker) {
        vu sum[4] = {};
        const uint32_t *at = words + size_t(unit) * PIECE;
        for (int i = 0; i < PIECE; i += 4 * VW) {
            __builtin_prefetch(at + i + 2048);
            for (int j = 0; j < 4; ++j) sum[j] += load<vu>(at + i + j * VW);
        }
        sum[0] += sum[1] + sum[2] + sum[3];
        kept[worker * 16] += sum[0][0];
    });
    const double seconds = now() - begin;
    volatile uint32_t sink = kept[0];
    (void)sink;
    return double(count / PIECE * PIECE) * sizeof(uint32_t) / seconds;
}

}  // namespace sapwood
