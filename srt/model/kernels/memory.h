// Memory from the system, in huge pages where it gives them.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace sapwood {

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
