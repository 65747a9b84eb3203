// A pool of threads that share the work of one step.
//
// The caller is one of the workers.  Between two jobs a worker spins for some tens of microseconds, since inside a
// step the next job follows at once, and then sleeps: a process without work takes no processor time.
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

    ~ThreadPool() {
        stop_.store(true);
        announce();
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
        busy_.store(size_ - 1, std::memory_order_relaxed);
        announce();
        take(0);
        for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins) {
            if (spins < SPINS)
                relax();
            else
                std::this_thread::yield();
        }
    }

  private:
    static constexpr int SPINS = 4000;

    struct alignas(64) Share {
        std::atomic<int> next{0};
        int end = 0;
    };

    void announce() {
        epoch_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) != 0) {
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

    void await(uint32_t seen) {
        for (int spins = 0; spins < SPINS; ++spins) {
            if (epoch_.load(std::memory_order_acquire) != seen) return;
            relax();
        }
        std::unique_lock<std::mutex> hold(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(hold, [&] { return epoch_.load(std::memory_order_seq_cst) != seen; });
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }

    void work(int worker) {
        for (uint32_t seen = 0;; ++seen) {
            await(seen);
            if (stop_.load()) return;
            take(worker);
            busy_.fetch_sub(1, std::memory_order_release);
        }
    }

    const int size_;
    void (*call_)(const void *, int, int) = nullptr;
    const void *job_ = nullptr;
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int> busy_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::unique_ptr<Share[]> shares_;
    std::vector<std::thread> threads_;
};

}  // namespace sapwood
