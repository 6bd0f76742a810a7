// The CPU backend's C interface: quantizers and epilogues whose integers equal reference.py bit for bit.
//
// On raw pointers, loaded with ctypes: no torch header, so it builds in seconds and does not depend on torch's ABI.
// Must be compiled with -ffp-contract=off: a fused multiply-add would round once where the reference rounds twice.

#include "epilogue.h"
#include "product.h"
#include "quantize.h"

namespace {

bool known(int block) { return block == 1 || (block % LANES == 0 && !(block & (block - 1)) && block <= LARGEST_BLOCK); }

}  // namespace

extern "C" {

// A quantizer's second result, one scale per row, never packed: see ``by_row``.
struct HotHfByRow {
    int block;
    float factor;
    int qmax;
    uint64_t seed;
    int64_t number_row;
    void* q;
    float* scale;
};

// Returns 0, or 1 for an argument it does not know.
int hot_hf_quantize(const void* x, int dtype, int64_t rows, int64_t cols, int64_t stride, int dim, int block, float factor,
                    const float* row_scale, const int32_t* keep, int kept, int qmax, int per_tensor, int packed,
                    int rounding, uint64_t seed, int64_t number_row, int64_t number_col, void* q, float* scale, int threads,
                    const HotHfByRow* also) {
    const Job j{x, rows, cols, stride, block, factor, qmax, per_tensor, packed, rounding, seed, (uint64_t)number_row,
                (uint64_t)number_col, (int8_t*)q, scale, threads};
    Job other = j;
    if (also) {
        other.block = also->block, other.factor = also->factor, other.qmax = also->qmax, other.per_tensor = 0;
        other.packed = 0, other.seed = also->seed, other.number_row = also->number_row, other.number_col = 1;
        other.q = (int8_t*)also->q, other.scale = also->scale;
    }
    const Job* by_row = also ? &other : nullptr;
    if (!known(block) || !known(other.block) || (also && dim == 1)) return 1;
    switch (dtype) {
        case F32: quantize<float>(j, dim, row_scale, keep, kept, by_row); return 0;
        case BF16: quantize<bf16>(j, dim, row_scale, keep, kept, by_row); return 0;
        case F16: quantize<f16>(j, dim, row_scale, keep, kept, by_row); return 0;
    }
    return 1;
}

// acc (rows, cols) int32, contiguous, to out (rows, out_cols): (a * acc) * b, transformed along cols for block >= 16.
int hot_hf_epilogue(const int32_t* acc, int64_t rows, int64_t cols, const float* a, int64_t a_step, const float* b,
                    int64_t b_step, int block, float factor, void* out, int dtype, int64_t out_cols, int threads) {
    switch (dtype) {
        case F32: epilogue(acc, rows, cols, a, a_step, b, b_step, block, factor, (float*)out, out_cols, threads); return 0;
        case BF16: epilogue(acc, rows, cols, a, a_step, b, b_step, block, factor, (bf16*)out, out_cols, threads); return 0;
        case F16: epilogue(acc, rows, cols, a, a_step, b, b_step, block, factor, (f16*)out, out_cols, threads); return 0;
    }
    return 1;
}

// Whether ``hot_hf_product`` runs here. Asks the system for the tiles: call it first.
int hot_hf_amx() { return amx_granted(); }

int64_t hot_hf_product_bytes(int64_t rows, int64_t cols, int64_t depth, int threads) {
    return packed_bytes(rows, depth) + packed_bytes(cols, depth) + threads * SIDE * SIDE * (int64_t)sizeof(int32_t);
}

// int8 a (rows, depth) times b (depth, cols), each with a step of 1 along one axis, to out (rows, out_cols):
// (a_scale * sum) * b_scale, transformed along cols for block >= 16. ``b_packed``: two 4-bit elements of a row in a byte,
// b_row bytes from row to row. ``scratch``: hot_hf_product_bytes, aligned to 64.
int hot_hf_product(const int8_t* a, int64_t a_row, int64_t a_col, const int8_t* b, int64_t b_row, int64_t b_col,
                   int b_packed, int64_t rows, int64_t cols, int64_t depth, const float* a_scale, int64_t a_step, const float* b_scale, int64_t b_step,
                   int block, float factor, void* out, int dtype, int64_t out_cols, int8_t* scratch, int threads) {
    const Product p{{a, a_row, a_col}, {b, b_col, b_row, b_packed != 0}, rows, cols, depth, a_scale, b_scale, a_step, b_step, block, factor,
                    out_cols, threads};
    switch (dtype) {
        case F32: product(p, (float*)out, scratch); return 0;
        case BF16: product(p, (bf16*)out, scratch); return 0;
        case F16: product(p, (f16*)out, scratch); return 0;
    }
    return 1;
}

int hot_hf_unpack(const int8_t* packed, int64_t rows, int64_t pitch, int64_t cols, int8_t* q, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * cols, threads)) if (threads_for(rows * cols, threads) > 1)
    for (int64_t r = 0; r < rows; r++) {
        const int8_t* p = packed + r * pitch;
        int8_t* o = q + r * cols;
        for (int64_t c = 0; c < cols / 2; c++) {
            o[2 * c] = (int8_t)((int8_t)(p[c] << 4) >> 4);
            o[2 * c + 1] = (int8_t)(p[c] >> 4);
        }
        if (cols % 2) o[cols - 1] = (int8_t)((int8_t)(p[cols / 2] << 4) >> 4);
    }
    return 0;
}
}
