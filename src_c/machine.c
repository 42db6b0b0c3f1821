/* machine.c - what the machine lends this process: cores, by its affinity and the CPU quotas of its cgroups, and L2.
 *
 * Every question has an answer on any POSIX system: without Linux's files and calls there is no quota, all cores that
 * are online count, and L2 has 1 MiB.  Quotas bind a cgroup and all below it; version 1 has them in cpu.cfs_quota_us
 * and cpu.cfs_period_us, version 2 in cpu.max.  Which cgroup: proc(5), /proc/self/mountinfo and /proc/self/cgroup.
 */
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels.h"

enum { PATH_SIZE = 1024, MOST_CPUS = 1 << 20 };

/* ---- cores ---- */

/* cores that the calling thread may run on */
static int affinity(void) {
#ifdef __linux__
    for (int most = 1024; most <= MOST_CPUS; most *= 2) { /* a set smaller than the kernel's own is refused */
        cpu_set_t *set = CPU_ALLOC((size_t)most);
        const size_t size = CPU_ALLOC_SIZE((size_t)most);
        const int found = set && sched_getaffinity(0, size, set) == 0 ? CPU_COUNT_S(size, set) : 0;
        CPU_FREE(set);
        if (found > 0) return found;
    }
#endif
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    return online > 0 ? (int)online : 1;
}

/* whether word is one of a list with commas */
static int listed(const char *list, const char *word) {
    const size_t length = strlen(word);
    for (const char *at = list; at; at = strchr(at, ','), at = at ? at + 1 : NULL)
        if (strncmp(at, word, length) == 0 && (at[length] == ',' || at[length] == '\0')) return 1;
    return 0;
}

/* the path of this process in the hierarchy of version 2, or in that of version 1 with the CPU quotas */
static int own_cgroup(const char *root, int version, char *path) {
    char name[PATH_SIZE], line[2 * PATH_SIZE];
    snprintf(name, sizeof name, "%s/proc/self/cgroup", root);
    FILE *file = fopen(name, "r");
    int found = 0;
    while (file && !found && fgets(line, sizeof line, file)) { /* number:controllers:path */
        char *list = strchr(line, ':'), *from = list ? strchr(list + 1, ':') : NULL;
        if (!from) continue;
        *from++ = '\0';
        from[strcspn(from, "\n")] = '\0';
        found = (version == 2 ? list[1] == '\0' : listed(list + 1, "cpu")) && strlen(from) < PATH_SIZE;
        if (found) strcpy(path, from);
    }
    if (file) fclose(file);
    return found;
}

/* up to two numbers of a file; "max" and what is missing read as nothing */
static int numbers(const char *folder, const char *name, double *out) {
    char path[4 * PATH_SIZE];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    const int count = file ? fscanf(file, "%lf %lf", out, out + 1) : 0;
    if (file) fclose(file);
    return count;
}

/* The quota of one cgroup, in cores. */
static double quota_of(const char *folder, int version) {
    double quota[2] = {-1, 0}, period[2] = {0, 0};
    if (version == 2) return numbers(folder, "cpu.max", quota) == 2 && quota[1] > 0 ? quota[0] / quota[1] : INFINITY;
    const int known = numbers(folder, "cpu.cfs_quota_us", quota) + numbers(folder, "cpu.cfs_period_us", period);
    return known == 2 && quota[0] > 0 && period[0] > 0 ? quota[0] / period[0] : INFINITY;
}

/* the least quota from the cgroup of this process up to the mounted one; mounted: its path, at: where */
static double least_quota(const char *root, const char *mounted, const char *at, int version) {
    char path[PATH_SIZE], folder[3 * PATH_SIZE];
    const size_t above = strcmp(mounted, "/") == 0 ? 0 : strlen(mounted);
    if (!own_cgroup(root, version, path)) return INFINITY;
    const char *below = path + above;
    /* a container may see its cgroup's path on the host, or one outside of its namespace, but only mount its own */
    if (strncmp(path, mounted, above) != 0 || (*below != '/' && *below != '\0') || strncmp(below, "/..", 3) == 0)
        below = "";
    snprintf(folder, sizeof folder, "%s%s%s", root, at, below);
    char *end = folder + strlen(folder), *top = end - strlen(below);
    double quota = INFINITY;
    for (;;) {
        quota = fmin(quota, quota_of(folder, version));
        if (end <= top) return quota;
        while (end > top && *--end != '/');
        *end = '\0';
    }
}

double mapuot_quota(const char *root) {
    char name[PATH_SIZE], mounted[PATH_SIZE], at[PATH_SIZE], type[32], options[PATH_SIZE], *line = NULL;
    size_t size = 0;
    double quota = INFINITY;
    snprintf(name, sizeof name, "%s/proc/self/mountinfo", root);
    FILE *file = fopen(name, "r");
    while (file && getline(&line, &size, file) > 0) {
        /* id parent device mounted at options ... - type source options */
        const char *rest = strstr(line, " - ");
        if (!rest || sscanf(line, "%*s %*s %*s %1023s %1023s", mounted, at) != 2 ||
            sscanf(rest, " - %31s %*s %1023s", type, options) != 2)
            continue;
        if (strcmp(type, "cgroup2") == 0) quota = fmin(quota, least_quota(root, mounted, at, 2));
        else if (strcmp(type, "cgroup") == 0 && listed(options, "cpu"))
            quota = fmin(quota, least_quota(root, mounted, at, 1));
    }
    free(line);
    if (file) fclose(file);
    return quota;
}

int mapuot_cores(void) {
    static _Atomic double known; /* the quota: reading it takes .2 ms */
    double quota = atomic_load(&known);
    if (quota == 0.0) {
        quota = mapuot_quota("");
        atomic_store(&known, quota);
    }
    const int cores = affinity();
    return quota < cores ? (int)fmax(1.0, round(quota)) : cores;
}

/* ---- L2 ---- */

static int64_t system_l2(void) {
#ifdef _SC_LEVEL2_CACHE_SIZE /* glibc; 0 on most aarch64 */
    if (sysconf(_SC_LEVEL2_CACHE_SIZE) > 0) return sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    for (int k = 0; k < 8; k++) { /* Linux */
        char folder[64];
        double level[2] = {0, 0}, kib[2] = {0, 0};
        snprintf(folder, sizeof folder, "/sys/devices/system/cpu/cpu0/cache/index%d", k);
        if (numbers(folder, "level", level) == 1 && level[0] == 2 && numbers(folder, "size", kib) == 1)
            return (int64_t)kib[0] << 10;
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
