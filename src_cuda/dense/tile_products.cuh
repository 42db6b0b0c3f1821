// Mirrors src_c/kernels_tmpl.c: one thread's products of a tile with v and with u, for every sweep over tiles.
//
// The entries come from a struct Entries (entries_stored.cuh), included before; the shape is R rows of VPT chunks.

// s_q = sum_j K_ij v_j over this thread's columns, for the R rows of a tile.
FN void tile_dots(const Entries &tile, int thread, const num (&v)[CPT], num (&s)[R]) {
    UNROLLED (int q = 0; q < R; q++) {
        num even = 0, odd = 0;
        UNROLLED (int c = 0; c < VPT; c++) {
            num k[CHUNK];
            tile.get(thread, q, c, k);
            UNROLLED (int e = 0; e < CHUNK; e += 2) {
                even = fma(k[e], v[c * CHUNK + e], even);
                odd = fma(k[e + 1], v[c * CHUNK + e + 1], odd);
            }
        }
        s[q] = even + odd;
    }
}

// acc_j += u_i K_ij, u of row q by u_of
template <typename U> FN void add_tile(const Entries &tile, int thread, U u_of, num (&acc)[CPT]) {
    UNROLLED (int q = 0; q < R; q++) {
        const num uq = u_of(q);
        UNROLLED (int c = 0; c < VPT; c++) {
            num k[CHUNK];
            tile.get(thread, q, c, k);
            UNROLLED (int e = 0; e < CHUNK; e++) acc[c * CHUNK + e] = fma(uq, k[e], acc[c * CHUNK + e]);
        }
    }
}

// add_tile with u of row q in lane q LANES of every warp
FN void add_tile(const Entries &tile, int thread, num u, num (&acc)[CPT]) {
    add_tile(tile, thread, [=](int q) { return __shfl_sync(FULL, u, q * LANES); }, acc);
}
