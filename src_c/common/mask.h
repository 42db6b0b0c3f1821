/* mask.h - the random mask, given by its seed: an entry of it is computed wherever it is needed.
 * For pair (i, j), numbered in the whole matrix, Philox4x32-10 makes 64 bits from the key and the counter (i, j). The
 * pair is kept if these bits are at most `limit`, keep 2^64 - 1. Only integers are used, so every machine and every
 * order of a sweep gets the same mask.
 * Source: Salmon, Moraes, Dror, Shaw, Parallel random numbers: as easy as 1, 2, 3, 2011.  Oracle:
 * mapuot/problem/mask.py. */
#pragma once
#include "common/record.h"

/* The first two of the four 32-bit words of the block with this key and 128-bit counter; word 0 is the low half. */
FN uint64_t philox(uint64_t key, uint64_t low, uint64_t high) {
    uint32_t a = (uint32_t)low, b = (uint32_t)(low >> 32), c = (uint32_t)high, d = (uint32_t)(high >> 32);
    uint32_t p = (uint32_t)key, q = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t x = (uint64_t)0xD2511F53u * a, y = (uint64_t)0xCD9E8D57u * c;
        a = (uint32_t)(y >> 32) ^ b ^ p;
        b = (uint32_t)y;
        c = (uint32_t)(x >> 32) ^ d ^ q;
        d = (uint32_t)x;
        p += 0x9E3779B9u;
        q += 0xBB67AE85u;
    }
    return a | (uint64_t)b << 32;
}

/* The weight of an entry in a block of rows: 0 or 1 / keep. The block begins at (row, col), counted as the sweep counts
 * rows and columns. `turned`: the sweep exchanges the rows and columns of the matrix. */
FN double mask_weight(const mapuot_mask *mask, int64_t i, int64_t j) {
    const uint64_t row = (uint64_t)(mask->row + i), col = (uint64_t)(mask->col + j);
    const uint64_t bits = mask->turned ? philox((uint64_t)mask->key, col, row) : philox((uint64_t)mask->key, row, col);
    return bits <= (uint64_t)mask->limit ? mask->weight : 0.0;
}
