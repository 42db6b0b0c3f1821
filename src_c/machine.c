/* machine.c - the L2 size of this machine, from the C library or Linux's files; 1 MiB if neither knows it. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "kernels.h"

/* the number at the start of a system file, 0 without one */
static int64_t number_in(const char *folder, const char *name) {
    char path[96];
    long long number = 0;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    if (file && fscanf(file, "%lld", &number) != 1) number = 0;
    if (file) fclose(file);
    return number;
}

static int64_t system_l2(void) {
#ifdef _SC_LEVEL2_CACHE_SIZE /* glibc; 0 on most aarch64 */
    if (sysconf(_SC_LEVEL2_CACHE_SIZE) > 0) return sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    for (int k = 0; k < 8; k++) { /* Linux */
        char folder[64];
        snprintf(folder, sizeof folder, "/sys/devices/system/cpu/cpu0/cache/index%d", k);
        const int64_t kib = number_in(folder, "size");
        if (number_in(folder, "level") == 2 && kib > 0) return kib << 10;
    }
    return 1 << 20;
}

int64_t mapuot_l2_bytes(void) {
    static atomic_llong known;
    int64_t bytes = atomic_load(&known);
    if (bytes <= 0) {
        const char *kib = getenv("MAPUOT_L2_KIB");
        bytes = kib ? atoll(kib) << 10 : 0;
        bytes = bytes > 0 ? bytes : system_l2();
        atomic_store(&known, bytes);
    }
    return bytes;
}
