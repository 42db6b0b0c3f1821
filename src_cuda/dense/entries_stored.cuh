// Mirrors src_c/kernels_tmpl.c (the source STORED): the entries of a tile for a sweep, here R consecutive rows of K
// in shared or in global memory.
//
// The interface between row_pass and the storage of K: a source opens a tile and gives one thread its entries, chunk by
// chunk, twice, for the row sums and for the column sums.  Another source is a header of its own, with a struct Entries
// of the same open and get, and one more choice of header in row_pass.cuh.
#include "common.cuh"

#ifndef BEYOND
#define BEYOND 0
#endif

// This thread's entries of a tile: kept in registers (HOLD) or read again from shared memory.
struct Entries {
#if HOLD
    uint4 word[R][VPT];
#else
    const unsigned char *from;
#endif
    int columns;

    // SPREAD: behind a row lies more of K; its products with v = 0 are 0, and its sums are not read.
    FN bool has(int thread, int c) const { return SPREAD || BEYOND || (c * GT + thread) * CHUNK < columns; }

    FN uint4 read(const unsigned char *tile, int thread, int q, int c) const {
        const unsigned char *at = tile + (q * columns + (c * GT + thread) * CHUNK) * (int)sizeof(real);
        return has(thread, c) ? *(const uint4 *)at : make_uint4(0, 0, 0, 0);
    }

    // rows: the number of rows of the tile; only with HOLD it may be below R, and the rest are zeros
    FN void open(const unsigned char *tile, int width, int thread, int rows = R) {
        columns = width;
#if HOLD
        UNROLLED (int q = 0; q < R; q++)
            UNROLLED (int c = 0; c < VPT; c++)
                word[q][c] = q < rows ? read(tile, thread, q, c) : make_uint4(0, 0, 0, 0);
#else
        (void)rows;
        from = tile;
#endif
    }

    FN void get(int thread, int q, int c, num (&k)[CHUNK]) const {
#if HOLD
        widen(word[q][c], k);
#else
        widen(read(from, thread, q, c), k);
#endif
    }
};
