// Many short jobs on pools of several sizes: every unit of every job is done once, and pools end while jobs are young.
#include "threads.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

using namespace sapwood;

static long wrong_units(ThreadPool &pool, int jobs) {
    long wrong = 0;
    std::vector<int> hits(40);
    for (int job = 0; job < jobs; ++job) {
        const int units = job % 37 + 1;
        std::fill(hits.begin(), hits.end(), 0);
        std::vector<int> *at = &hits;
        pool.each(units, [at](int unit, int) { ++(*at)[unit]; });
        for (int unit = 0; unit < units; ++unit) wrong += hits[unit] != 1;
        // Long enough for the workers to fall asleep now and then.
        if (job % 997 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return wrong;
}

int main() {
    long wrong = 0;
    for (int size = 0; size <= 5; ++size) {
        ThreadPool pool(size);
        wrong += wrong_units(pool, 20000);
    }
    for (int i = 0; i < 500; ++i) {
        ThreadPool pool(3);
        wrong += wrong_units(pool, i % 3);
    }
    std::printf("%ld\n", wrong);
}
