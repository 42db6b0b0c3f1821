// The sweep over K for rows wider than a block: a row is spread over the warps of a cluster, which work independently.
//
// A cluster sweeps its share of the rows. Each of its warps, the workers, owns a strip of at most 32 CPT columns, with
// v and sums in registers and a ring of tiles in shared memory. A worker posts the products of its tiles with v.
// One worker, the clerk of this step, adds them up, finds u and posts it. Each worker uses u `lag` steps later, while
// more tiles stream by, so that the way there and back costs nothing.  No warp ever meets another before the end.
// Numbers are sent as letters: 32 bits beside the number of the step, written at once. A reader knows from the letter
// itself if it has come, so that no order of writes and no clearing is needed. A worker that posts step k has used step
// k - lag - 1, so the whole cluster has posted that step: a mailbox holds MAIL > lag steps.

#define MAIL SLOTS                   // steps that a mailbox holds
#define WORDS ((int)sizeof(num) / 4) // letters of a number
#define LETTERS 8                    // letters (Mail) that one lane of a clerk waits for at once

static_assert(CLUSTER <= LANES, "a clerk's lanes of a row write to one block each");

// The layout of rows on the workers of so many blocks, by Shape.spread of mapuot/backends/cuda/kernels.py. Strips are
// whole, since a step takes a worker the same time for fewer columns; the workers left over do nothing.
struct RowLayout {
    int streams, strips, slice; // clusters, each with a stream of tiles; strips of a row and columns of a strip
    int64_t tiles, steps;       // tiles of all streams; steps of the longest
};

FN RowLayout row_layout(const State &S, int blocks) {
    const int chunks = (int)S.ld / CHUNK, clusters = blocks / CLUSTER, share = chunks / CLUSTER;
    const int64_t tiles = (S.m + R - 1) / R;
    const int streams = clusters < tiles ? clusters : (int)tiles, each = share < WIDTH / CHUNK ? share : WIDTH / CHUNK;
    return {streams, (chunks + each - 1) / each, each * CHUNK, tiles, (tiles + streams - 1) / streams};
}

// The strip of a worker. Neighbouring strips belong to different blocks, and so do the workers left over.
FN int strip_of(int group) { return group * CLUSTER + (int)cluster_rank(); }

struct Letter {
    uint64_t word[WORDS];
};

FN bool is_of(const Letter &x, uint32_t step) {
    bool is = true;
    UNROLLED (int i = 0; i < WORDS; i++) is &= (uint32_t)(x.word[i] >> 32) == step;
    return is;
}

FN num number(const Letter &x) {
    return NARROW ? (num)__uint_as_float((uint32_t)x.word[0])
                  : (num)__hiloint2double((int)(uint32_t)x.word[WORDS - 1], (int)(uint32_t)x.word[0]);
}

FN Letter letter_of(num x, uint32_t step) {
    const uint64_t stamp = (uint64_t)step << 32;
#if NARROW
    return {{stamp | __float_as_uint(x)}};
#else
    return {{stamp | (uint32_t)__double2loint(x), stamp | (uint32_t)__double2hiint(x)}};
#endif
}

// ---- mailboxes: the clerk's block has one for the products of a row with the strips, every block one for u of a row

struct Mail {
    Letter part[MAIL / CLUSTER][R][CLUSTER * GROUPS], scale[MAIL][R];
};

FN Mail &own_mail();

FN Letter look(const Letter &at) {
    Letter x;
    UNROLLED (int i = 0; i < WORDS; i++)
        asm volatile("ld.relaxed.cluster.shared::cta.u64 %0, [%1];"
                     : "=l"(x.word[i])
                     : "r"(shared_address(at.word + i))
                     : "memory");
    return x;
}

// Send x to the mailbox of another block of the cluster. to: the same place in this block's mailbox.
FN void send(const Letter &to, const Letter &x, int block) {
    uint32_t remote;
    UNROLLED (int i = 0; i < WORDS; i++) {
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(to.word + i)), "r"(block));
        asm volatile("st.relaxed.cluster.shared::cluster.u64 [%0], %1;" ::"r"(remote), "l"(x.word[i]) : "memory");
    }
}

// Letters with the products of one row and each strip; block step % CLUSTER adds them up for this row.
FN Letter *part_mail(uint32_t step, int row) { return own_mail().part[step / CLUSTER % (MAIL / CLUSTER)][row]; }

FN Letter &scale_mail(uint32_t step, int row) { return own_mail().scale[step % MAIL][row]; }

// Clear the letters of earlier launches; the cluster meets before the first one is sent.
FN void empty_mail() {
    for (int q = threadIdx.x; q < (int)sizeof(Mail) / 8; q += THREADS) ((uint64_t *)&own_mail())[q] = 0;
}

// ---- the sweep

FN int around(int slot, int turn, int slots) {
    return turn > 0 ? (slot + 1 < slots ? slot + 1 : 0) : (slot > 0 ? slot - 1 : slots - 1);
}

// The sum over all strips of the row of this lane, once all have come
FN num whole_row(const Letter *from, int strips, uint32_t step, int lane) {
    double sum = 0;
    while (__any_sync(FULL, !is_of(look(*from), step)));
    ROLLED (int first = 0; first < strips; first += LANES * LETTERS) {
        Letter letter[LETTERS] = {};
        bool wait;
        do {
            wait = false;
            UNROLLED (int i = 0; i < LETTERS; i++) {
                const int p = first + i * LANES + lane % LANES;
                if (p < strips && !is_of(letter[i], step)) {
                    letter[i] = look(from[p]);
                    wait |= !is_of(letter[i], step);
                }
            }
        } while (__any_sync(FULL, wait));
        UNROLLED (int i = 0; i < LETTERS; i++) sum += number(letter[i]); // 0 behind the last
    }
    return (num)warp_sum<LANES>(sum);
}

// The work of a step's clerk: u of the rows from i on, from their products with all strips. Out of line, so that the
// sweep keeps its registers.
__device__ __noinline__ void clerk(const State &S, const RowLayout &layout, uint32_t step, int i, double shift,
                                   RowSums *sums) {
    const int lane = threadIdx.x % 32, row = lane / LANES;
    const Row kept = row_of(S.point[i + row < (int)S.m ? i + row : (int)S.m - 1], shift);
    const num s = whole_row(part_mail(step, row), layout.strips, step, lane);
    const num u = (num)WIDEN * row_scale(S, i + row, kept, s, shift, lane % LANES == 0, sums[row]);
    if (lane % LANES < CLUSTER) send(scale_mail(step, row), letter_of(u, step), lane % LANES);
}

// A worker's sweep; tile t lies in slot t % slots.  It is the clerk of every period-th step, a step late, when most
// products will have come, or two steps late if u may come much later: a clerk sends its own next products only after
// its duty, which takes 1.5 steps, and the clerk that needs them would begin where this one ends (100000 columns: 1.17
// and, with float64 sums, 1.36 times as long). Data not needed in every step stays in shared memory (layout, g, shift).
FN void spread_pass(const State &S, const RowLayout &layout, Ring &g, int group, int lag, const double &shift,
                    RowSums *sums, const num (&v)[CPT], num (&acc)[CPT]) {
    const int lane = threadIdx.x % 32, row = lane / LANES, strip = strip_of(group), slots = g.slots, tiles = g.tiles,
              turn = g.forward ? 1 : -1;
    const uint32_t period = layout.strips / CLUSTER * CLUSTER,
                   start = g.step; // step % CLUSTER is the block of its clerk
    uint32_t duty = strip < (int)period ? (strip + period - start % period) % period : 1u << 31; // its next duty
    const int late = lag > 3 ? 2 : 1;
    uint32_t parity = g.parity;
    int to = (g.forward ? 0 : tiles - 1) % slots, from = to;
    Letter letter = {};
    Entries entries;
    num sum[CPT] = {}; // of narrow passes
    for (int k = 0; k < tiles + lag; k++) {
        if (k < tiles) {
            num s[R];
            await(g.full + to * 8, (parity >> to) & 1);
            entries.open(memory + g.tile + to * g.bytes, g.columns, lane);
            tile_dots(entries, lane, v, s);
            const num whole = warp_sums<R>(s, lane);
            if (lane % LANES == 0)
                send(part_mail(start + k, row)[strip], letter_of(whole, start + k), (start + k) % CLUSTER);
            to = around(to, turn, slots);
        }
        if (duty + late == (uint32_t)k && k < tiles + late) {
            const int tile = turn > 0 ? k - late : tiles - 1 + late - k;
            clerk(S, layout, start + duty, (g.first + tile) * R, shift, sums);
            duty += layout.strips / CLUSTER * CLUSTER;
        }
        if (k >= lag) {
            const uint32_t step = start + k - lag;
            while (__any_sync(FULL, !is_of(letter, step))) letter = look(scale_mail(step, row));
            entries.open(memory + g.tile + from * g.bytes, g.columns, lane);
            add_tile(entries, lane, number(letter), acc);
            if (NARROW && step % (SHORT / R) == 0) fold(acc, sum);
            __syncwarp();
            if (k - lag + slots < tiles) { // load a tile into the slot that this one has left
                parity ^= 1u << from;
                if (lane == 0) fetch(S, g, turn > 0 ? k - lag + slots : tiles - 1 - (k - lag + slots), from);
            }
            from = around(from, turn, slots);
        }
        if (k + 1 >= lag && k + 1 < tiles + lag) // load u of the next step during its products
            letter = look(scale_mail(start + k + 1 - lag, row));
    }
    UNROLLED (int c = 0; NARROW && c < CPT; c++) acc[c] += sum[c];
    __syncwarp();
    if (lane == 0) {
        g.parity = parity;
        g.step = start + (uint32_t)layout.steps;
        g.forward = turn < 0;
    }
}
