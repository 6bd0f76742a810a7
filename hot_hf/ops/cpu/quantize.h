// Quantizers: transform, absolute maximum, integers, in one or two passes over the input.

#pragma once

#include "vectors.h"

namespace {

struct Job {
    const void* x;
    int64_t rows, cols, stride;  // of x, row-major with unit column stride
    int block;
    float factor;
    int qmax, per_tensor, packed, rounding;
    uint64_t seed, number_row, number_col;  // an element's number for stochastic rounding
    int8_t* q;
    float* scale;
    int threads;
};

// ---- one scale per row --------------------------------------------------------------------------------------------

// Row to ``row`` (padded floats), transformed; returns the bits of its absolute maximum.
template <class T> int32_t transform_row(const T* x, int64_t cols, int block, float factor, float* row, int64_t padded) {
    const int64_t full = cols / LANES * LANES;
    vi max = {};
    if (block == LANES) {
        for (int64_t c = 0; c < full; c += LANES) {
            vf v = transform16(load(x + c)) * factor;
            max = abs_max(max, v);
            store(row + c, v);
        }
        if (full < cols) {
            vf v = transform16(load(x + full, cols - full)) * factor;
            max = abs_max(max, v);
            store(row + full, v);
        }
        return highest(max);
    }
    for (int64_t c = 0; c < full; c += LANES) {
        vf v = load(x + c);
        max = abs_max(max, v);
        store(row + c, v);
    }
    for (int64_t c = full; c < padded; c += LANES) {
        vf v = load(x + c, cols - c);
        max = abs_max(max, v);
        store(row + c, v);
    }
    if (block == 1) return highest(max);
    butterfly_row(row, padded, block);
    max = vi{};
    for (int64_t c = 0; c < padded; c += LANES) {
        vf v = load(row + c) * factor;
        max = abs_max(max, v);
        store(row + c, v);
    }
    return highest(max);
}

template <bool PACKED> void quantize_row(const Job& j, const float* row, int64_t width, int64_t r, Scale s, int8_t* q) {
    const vf inverse = splat(s.inverse);
    const vi live = splat(s.live);
    const int rounding = j.rounding, qmax = j.qmax;
    const uint64_t seed = j.seed, first = r * j.number_row, step = j.number_col;
    auto put = [&](int64_t c, vi v, int64_t n) __attribute__((always_inline)) {
        if (PACKED) store_int4(q + c / 2, v, n);
        else store_int8(q + c, v, n);
    };
    int64_t c = 0;
    if (rounding == NEAREST) {
        for (; c + LANES <= width; c += LANES) put(c, round_nearest(scaled(load(row + c), inverse, live)), LANES);
        if (c < width) put(c, round_nearest(scaled(load(row + c), inverse, live)), width - c);
        return;
    }
    for (; c < width; c += LANES)
        put(c, round_with_noise(scaled(load(row + c), inverse, live), rounding, qmax, seed, first + c * step, step), width - c);
}

// The rows of a job, one after the other, in a buffer of one thread.
template <class T> struct RowQuantizer {
    const Job& j;
    const int64_t width = (j.cols + j.block - 1) / j.block * j.block;  // of the result
    const int64_t padded = (width + LANES - 1) / LANES * LANES;
    const int64_t pitch = j.packed ? (width + 1) / 2 : width;
    std::vector<float> buffer = std::vector<float>(padded + LANES);
    float* const row = (float*)(((uintptr_t)buffer.data() + 63) & ~(uintptr_t)63);  // a store across lines costs two

    explicit RowQuantizer(const Job& job) : j(job) {}
    int32_t transform(int64_t r) { return transform_row((const T*)j.x + r * j.stride, j.cols, j.block, j.factor, row, padded); }
    void quantize(int64_t r, Scale s) {
        if (j.packed) quantize_row<true>(j, row, width, r, s, j.q + r * pitch);
        else quantize_row<false>(j, row, width, r, s, j.q + r * pitch);
    }
    void per_row(int64_t r) {
        const Scale s = scale_of(transform(r), j.qmax);
        j.scale[r] = s.scale;
        quantize(r, s);
    }
};

template <class T> void quantize_rows(const Job& j) {
    const int n = threads_for(j.rows * j.cols, j.threads);
    int32_t all = 0;
#pragma omp parallel num_threads(n) if (n > 1)
    {
        RowQuantizer<T> rows(j);
        if (j.per_tensor) {
            int32_t mine = 0;
#pragma omp for schedule(static) nowait
            for (int64_t r = 0; r < j.rows; r++) mine = std::max(mine, rows.transform(r));
#pragma omp critical(hot_hf_absmax)
            all = std::max(all, mine);
#pragma omp barrier
            const Scale s = scale_of(all, j.qmax);
#pragma omp for schedule(static)
            for (int64_t r = 0; r < j.rows; r++) {
                rows.transform(r);
                rows.quantize(r, s);
            }
#pragma omp single
            j.scale[0] = s.scale;
        } else {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < j.rows; r++) rows.per_row(r);
        }
    }
}

// ---- one scale per column -----------------------------------------------------------------------------------------

// Transforms along the rows: blocks of B rows, of which the ``kept`` rows ``keep`` are used. ``row_scale`` multiplies
// the rows first. Threads share the row blocks, so that memory is read in order whatever the width.
// ``by_row``: a second job on the same rows, one scale each, done while they are in the cache.
// BLOCK: 1 and 16 are compiled apart, so that a block lives in registers; 0 takes any other from ``j.block``.
template <class T, int BLOCK>
void quantize_columns(const Job& j, const float* row_scale, const int32_t* keep, int kept, const Job* by_row) {
    const int B = BLOCK ? BLOCK : j.block;
    const int64_t blocks = (j.rows + B - 1) / B, cols = j.cols, stride = j.stride;
    const float factor = j.factor;
    const int64_t vectors = (j.cols + LANES - 1) / LANES;
    const int64_t pitch = j.packed ? (j.cols + 1) / 2 : j.cols;
    const int n = threads_for(j.rows * j.cols, j.threads);
    std::vector<vi> maxima((size_t)n * vectors);
    std::vector<Scale> scales(vectors * LANES);

    auto transformed = [&](int64_t b, int64_t c, vf* v) __attribute__((always_inline)) {
        const T* x = (const T*)j.x + b * B * stride + c;
        const int64_t rows = std::min<int64_t>(B, j.rows - b * B), columns = cols - c;
        if (BLOCK && rows == B && columns >= LANES) {
#pragma GCC unroll 16
            for (int r = 0; r < BLOCK; r++) v[r] = load(x + r * stride);
        } else {
            for (int r = 0; r < B; r++) v[r] = r < rows ? load(x + r * stride, columns) : vf{};
        }
        if (BLOCK == 1 && row_scale) v[0] = v[0] * row_scale[b];
        if (BLOCK == LANES) butterfly_vectors(v);
        if (BLOCK == 0) {
            for (int i = 0; i < B; i += LANES) butterfly_vectors(v + i);
            for (int s = LANES; s < B; s *= 2)
                for (int i = 0; i < B; i += 2 * s)
                    for (int k = i; k < i + s; k++) {
                        vf even = v[k], odd = v[k + s];
                        v[k] = even + odd;
                        v[k + s] = even - odd;
                    }
        }
    };

#pragma omp parallel num_threads(n) if (n > 1)
    {
        vi* max = maxima.data() + omp_get_thread_num() * vectors;
        vf v[BLOCK ? BLOCK : LARGEST_BLOCK];
        RowQuantizer<T> rows(by_row ? *by_row : j);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            if (by_row)
                for (int64_t r = b * B; r < std::min(b * B + B, j.rows); r++) rows.per_row(r);
            for (int64_t c = 0; c < vectors; c++) {
                transformed(b, c * LANES, v);
                vi m = max[c];
                if (BLOCK == 1) m = abs_max(m, v[0]);
                else
                    for (int k = 0; k < kept; k++) m = abs_max(m, v[keep[k]] * factor);
                max[c] = m;
            }
        }
#pragma omp single
        {
            vi all = {};
            for (int64_t c = 0; c < vectors; c++) {
                vi m = maxima[c];
                for (int t = 1; t < n; t++) {
                    vi o = maxima[t * vectors + c];
                    m = o > m ? o : m;
                }
                maxima[c] = m;
                all = m > all ? m : all;
            }
            const Scale whole = scale_of(highest(all), j.qmax);
            for (int64_t c = 0; c < vectors * LANES; c++)
                scales[c] = j.per_tensor ? whole : scale_of(maxima[c / LANES][c % LANES], j.qmax);
            if (j.per_tensor) j.scale[0] = whole.scale;
            else
                for (int64_t c = 0; c < j.cols; c++) j.scale[c] = scales[c].scale;
        }
        const int rounding = j.rounding, qmax = j.qmax, packed = j.packed;
        int8_t* const out = j.q;
        std::vector<vf> inverses(vectors);
        std::vector<vi> lives(vectors);
        for (int64_t c = 0; c < vectors; c++)
            for (int i = 0; i < LANES; i++) inverses[c][i] = scales[c * LANES + i].inverse, lives[c][i] = scales[c * LANES + i].live;
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++)
            for (int64_t c = 0; c < vectors; c++) {
                transformed(b, c * LANES, v);
                const vf inverse = inverses[c];
                const vi live = lives[c];
                for (int k = 0; k < kept; k++) {
                    const int64_t r = b * kept + k;
                    const vf value = scaled(BLOCK == 1 ? v[0] : v[keep[k]] * factor, inverse, live);
                    const vi q = rounding == NEAREST
                                     ? round_nearest(value)
                                     : round_with_noise(value, rounding, qmax, j.seed,
                                                        r * j.number_row + c * LANES * j.number_col, j.number_col);
                    if (packed) store_int4(out + r * pitch + c * (LANES / 2), q, cols - c * LANES);
                    else store_int8(out + r * pitch + c * LANES, q, cols - c * LANES);
                }
            }
    }
}

template <class T>
void quantize(const Job& j, int dim, const float* row_scale, const int32_t* keep, int kept, const Job* by_row) {
    if (dim == 1) quantize_rows<T>(j);
    else if (j.block == 1) quantize_columns<T, 1>(j, row_scale, keep, kept, by_row);
    else if (j.block == LANES) quantize_columns<T, LANES>(j, row_scale, keep, kept, by_row);
    else quantize_columns<T, 0>(j, row_scale, keep, kept, by_row);
}

}  // namespace
