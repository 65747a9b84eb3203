// A pool of threads that share the work of one step.
//
// The caller is one of the workers.  Between two jobs a worker spins for some tens of microseconds, since inside a
// step the next job follows at once, and then sleeps: a process without work takes no processor time.  The caller
// waits for those workers only that have entered its job: on a busy machine a worker that the system does not let
// run holds nobody up.
//
//     state:  | number of the job | open | workers inside |
//
// What belongs to a job is written while it is closed with nobody inside, and read inside only.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "simd.h"

namespace sapwood {

SAPWOOD_INLINE void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class ThreadPool {
  public:
    explicit ThreadPool(int size) : size_(size < 1 ? 1 : size), shares_(new Share[size_]) {
        for (int i = 1; i < size_; ++i) threads_.emplace_back([this, i] { work(i); });
    }

    ThreadPool(const ThreadPool &) = delete;
    ThreadPool &operator=(const ThreadPool &) = delete;

    ~ThreadPool() {
        stop_.store(true);
        open();
        for (auto &thread : threads_) thread.join();
    }

    int size() const { return size_; }

    // Calls job(unit, worker) for every unit in [0, units), each once, on any worker.  Returns when all are done.
    // A worker walks its own stretch of the units in order, so that what lies one after another in memory is read
    // so, and then helps with the stretches of the others.  No result may depend on which worker takes a unit.
    template <class Job>
    void each(int units, const Job &job) {
        if (units <= 0) return;
        if (size_ == 1 || units == 1) {
            for (int i = 0; i < units; ++i) job(i, 0);
            return;
        }
        call_ = [](const void *job_pointer, int unit, int worker) {
            (*static_cast<const Job *>(job_pointer))(unit, worker);
        };
        job_ = &job;
        for (int i = 0; i < size_; ++i) {
            shares_[i].next.store(int(int64_t(units) * i / size_), std::memory_order_relaxed);
            shares_[i].end = int(int64_t(units) * (i + 1) / size_);
        }
        open();
        take(0);
        state_.fetch_and(~OPEN, std::memory_order_acq_rel);
        for (int spins = 0; (state_.load(std::memory_order_acquire) & INSIDE) != 0; ++spins) {
            if (spins < SPINS)
                relax();
            else
                std::this_thread::yield();
        }
    }

  private:
    static constexpr int SPINS = 4000;
    static constexpr uint64_t INSIDE = 0xffff, OPEN = 1 << 16, NUMBER = uint64_t(1) << 17;

    struct alignas(64) Share {
        std::atomic<int> next{0};
        int end = 0;
    };

    static uint64_t number(uint64_t state) { return state / NUMBER; }

    // Gives the job the next number, and wakes who sleeps.
    void open() {
        state_.store((number(state_.load(std::memory_order_relaxed)) + 1) * NUMBER | OPEN, std::memory_order_seq_cst);
        if (sleepers_.exchange(0, std::memory_order_seq_cst) != 0) {
            std::lock_guard<std::mutex> hold(mutex_);
            wake_.notify_all();
        }
    }

    void take(int worker) {
        for (int i = 0; i < size_; ++i) {
            Share &share = shares_[(worker + i) % size_];
            for (int unit; (unit = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;)
                call_(job_, unit, worker);
        }
    }

    // The state once its number is not `seen` any more.
    uint64_t await(uint64_t seen) {
        for (int spins = 0; spins < SPINS; ++spins) {
            const uint64_t state = state_.load(std::memory_order_acquire);
            if (number(state) != seen) return state;
            relax();
        }
        std::unique_lock<std::mutex> hold(mutex_);
        for (;;) {
            sleepers_.fetch_add(1, std::memory_order_seq_cst);
            const uint64_t state = state_.load(std::memory_order_seq_cst);
            if (number(state) != seen) return state;
            wake_.wait(hold);
        }
    }

    void work(int worker) {
        for (uint64_t seen = 0;;) {
            uint64_t state = await(seen);
            // Enter, unless the job is closed by now.
            while ((state & OPEN) && !state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
            }
            if (stop_.load()) return;
            seen = number(state);
            if (!(state & OPEN)) continue;
            take(worker);
            state_.fetch_sub(1, std::memory_order_release);
        }
    }

    const int size_;
    void (*call_)(const void *, int, int) = nullptr;
    const void *job_ = nullptr;
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::unique_ptr<Share[]> shares_;
    std::vector<std::thread> threads_;
};

}  // namespace sapwood
