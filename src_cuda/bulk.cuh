// A block's shared memory, and bulk copies into it that an mbarrier counts: sm_90.
#include "common.cuh"

// All of a block's shared memory.  Tiles are found by their offset from here: through a stored pointer they would be
// read by generic loads, with 64-bit addresses.
extern __shared__ __align__(128) unsigned char memory[];

FN uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

FN void await(uint32_t full, uint32_t parity) {
    asm volatile("{\n.reg .pred done;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra AGAIN;\n}" ::"r"(full),
                 "r"(parity)
                 : "memory");
}

FN void copy_in(uint32_t to, const void *from, uint32_t bytes, uint32_t full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(full)
                 : "memory");
}
