// A block's shared memory, and copies into it counted by an mbarrier. BULK 1 (sm_90 on): bulk copies by one thread.
// BULK 0: 16 bytes at a time by all threads of a group, and each thread arrives when its own bytes are there.
#include "common.cuh"

#pragma option BULK 1
#if BULK
#define WAIT "mbarrier.try_wait"
#else
#define WAIT "mbarrier.test_wait"
#endif

// All of a block's shared memory. Tiles are addressed by their offset from here: a stored pointer would cause
// generic loads with 64-bit addresses.
extern __shared__ __align__(128) unsigned char memory[];

FN uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

FN void await(uint32_t full, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\nAGAIN: " WAIT ".parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra AGAIN;\n}" ::"r"(full),
                 "r"(parity)
                 : "memory");
}

FN void copy_in(uint32_t to, const void *from, uint32_t bytes, uint32_t full) {
#if BULK
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(full)
                 : "memory");
#else
    for (uint32_t q = threadIdx.x % GT * 16; q < bytes; q += GT * 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + q), "l"((const char *)from + q) : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full) : "memory");
#endif
}
