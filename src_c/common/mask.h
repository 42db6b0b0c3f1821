/* mask.h - the random mask that is a seed: which pairs are kept, made anew wherever an entry is.  Of pair (i, j), in the
 * numbering of the whole matrix, Philox4x32-10 makes 64 bits from the key and the counter (i, j); it is kept where they
 * are at most `limit`, keep 2^64 - 1.  Integers only, so that every machine and every order of a sweep gets the same mask.
 * Source: Salmon, Moraes, Dror, Shaw, Parallel random numbers: as easy as 1, 2, 3, 2011.  Oracle: mapuot/problem/mask.py. */
#pragma once
#include "common/record.h"

/* Words 0 (low) and 1 of the block with this key and counter, each of two words, of four. */
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

/* What an entry of a block of rows weighs: 0 or 1 / keep.  The block begins at (row, col) of what the sweep calls rows
 * and columns, which `turned` exchanges. */
FN double mask_weight(const mapuot_mask *mask, int64_t i, int64_t j) {
    const uint64_t row = (uint64_t)(mask->row + i), col = (uint64_t)(mask->col + j);
    const uint64_t bits = mask->turned ? philox((uint64_t)mask->key, col, row) : philox((uint64_t)mask->key, row, col);
    return bits <= (uint64_t)mask->limit ? mask->weight : 0.0;
}
