// Memory from the system, in huge pages where it gives them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <vector>

namespace sapwood {

template <class E>
struct LineAllocator {
    typedef E value_type;
    static constexpr std::align_val_t LINE{64};

    LineAllocator() = default;
    template <class F>
    LineAllocator(const LineAllocator<F> &) {}

    E *allocate(size_t count) { return static_cast<E *>(::operator new(count * sizeof(E), LINE)); }
    void deallocate(E *at, size_t) { ::operator delete(at, LINE); }
    bool operator==(const LineAllocator &) const { return true; }
    bool operator!=(const LineAllocator &) const { return false; }
};

// A vector that begins with a cache line: whole vectors of the machine would lie across two otherwise.
template <class E>
using Lines = std::vector<E, LineAllocator<E>>;

// Zero at first, and aligned to a page.
class Memory {
  public:
    Memory() = default;
    Memory(const Memory &) = delete;
    Memory &operator=(const Memory &) = delete;
    ~Memory() { release(); }

    // Room for `count` elements; what was there before is lost when it grows.
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

}  // namespace sapwood
