// Epilogue of a product: int32 to scaled output, transformed if asked.

#pragma once

#include "vectors.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

// Fresh memory about to be written: one call for a range (14 ms of one thread for 50 MB) instead of a fault for each of
// its 4 KB pages (19 ms). Huge pages would take fewer, but a virtual machine may have to fetch each from its host first:
// the same backward took 43 ms or 117. Only whole pages inside the range, so nothing beyond it grows; Linux before 5.14
// does not know the advice and refuses it.
INLINE void populate(const void* first, int64_t bytes) {
#ifdef __linux__
    constexpr uintptr_t PAGE = 4096;
    const uintptr_t from = ((uintptr_t)first + PAGE - 1) & ~(PAGE - 1), to = ((uintptr_t)first + bytes) & ~(PAGE - 1);
    if (to > from) madvise((void*)from, to - from, 23 /* MADV_POPULATE_WRITE */);
#endif
}

// One row of int32 sums to (s * sum) * b, transformed along the row for block >= 16; ``buffer`` holds a row for block > 16.
template <class T>
INLINE void epilogue_row(const int32_t* in, int64_t cols, float s, const float* b, int64_t b_step, int block, float factor,
                         T* o, int64_t out_cols, float* buffer) {
    for (int64_t c = 0; c < cols; c += LANES) {
        vi q = {};
        if (cols - c >= LANES) std::memcpy(&q, in + c, sizeof q);
        else std::memcpy(&q, in + c, (cols - c) * sizeof(int32_t));
        vf v = __builtin_convertvector(q, vf) * s;
        if (b) v = v * (b_step ? load(b + c, cols - c) : splat(b[0]));
        if (block == LANES) v = transform16(v) * factor;
        if (block > LANES) store(buffer + c, v, cols - c);
        else if (c < out_cols) store(o + c, v, out_cols - c);
    }
    if (block > LANES) {
        butterfly_row(buffer, cols, block);
        for (int64_t c = 0; c < out_cols; c += LANES) store(o + c, load(buffer + c) * factor, out_cols - c);
    }
}

template <class T>
void epilogue(const int32_t* acc, int64_t rows, int64_t cols, const float* a, int64_t a_step, const float* b, int64_t b_step,
              int block, float factor, T* out, int64_t out_cols, int threads) {
    const int64_t padded = (cols + LANES - 1) / LANES * LANES;
#pragma omp parallel num_threads(threads_for(rows * cols, threads)) if (threads_for(rows * cols, threads) > 1)
    {
        std::vector<float> buffer(block > LANES ? padded : 0);
        // Half a megabyte at a time: the zeros are still in the thread's cache when they are written over. Of a 4096 x 768
        // x 3072 backward it takes 5%. Smaller results come from memory that the allocator holds.
        const int64_t row_bytes = out_cols * sizeof(T), ahead = std::max<int64_t>(1, (512 << 10) / row_bytes);
        int64_t next = rows * row_bytes >= (4 << 20) ? 0 : rows;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            if (r >= next) {
                populate(out + r * out_cols, std::min(ahead, rows - r) * row_bytes);
                next = r + ahead;
            }
            epilogue_row(acc + r * cols, cols, a[r * a_step], b, b_step, block, factor, out + r * out_cols, out_cols,
                         buffer.data());
        }
    }
}

}  // namespace
