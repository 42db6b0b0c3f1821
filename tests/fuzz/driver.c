/* driver.c - main of core.c where the compiler has no libFuzzer: the files of a corpus, then random mutations of them.
 *
 * driver [-runs=N] [-max_total_time=S] [-seed=N] FOLDER...    nothing is learned from coverage, nothing is written
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST_FILES = 4096, MOST_BYTES = 4096 };

static struct {
    uint8_t bytes[MOST_BYTES];
    size_t size;
} seeds[MOST_FILES];
static int count;
static uint64_t state = 1;

static unsigned draw(unsigned n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(state >> 33) % n;
}

static void read_folder(const char *folder)
{
    DIR *directory = opendir(folder);
    struct dirent *entry;
    while (directory && (entry = readdir(directory)) && count < MOST_FILES) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        FILE *file = entry->d_name[0] == '.' ? NULL : fopen(path, "rb");
        if (!file)
            continue;
        seeds[count].size = fread(seeds[count].bytes, 1, MOST_BYTES, file);
        fclose(file);
        count++;
    }
    if (directory)
        closedir(directory);
}

/* a few bytes exchanged, put in, taken out or copied from another seed */
static size_t mutate(uint8_t *bytes)
{
    const int from = (int)draw((unsigned)count), other = (int)draw((unsigned)count);
    size_t size = seeds[from].size;
    memcpy(bytes, seeds[from].bytes, size);
    for (unsigned k = 1 + draw(8); k > 0; k--) {
        const size_t at = size ? draw((unsigned)size) : 0, span = size ? 1 + draw((unsigned)(size - at)) : 0;
        switch (draw(5)) {
        case 0:
            size = draw(8) ? size : at;
            break;
        case 1:
            if (size < MOST_BYTES)
                bytes[size++] = (uint8_t)draw(256);
            break;
        case 2:
            if (seeds[other].size > at)
                memcpy(bytes + at, seeds[other].bytes + at,
                       span < seeds[other].size - at ? span : seeds[other].size - at);
            break;
        default:
            if (size)
                bytes[at] = (uint8_t)draw(256);
        }
    }
    return size;
}

int main(int argc, char **argv)
{
    static uint8_t bytes[MOST_BYTES];
    long runs = -1, seconds = -1, made = 0;
    for (int k = 1; k < argc; k++)
        if (sscanf(argv[k], "-runs=%ld", &runs) != 1 && sscanf(argv[k], "-max_total_time=%ld", &seconds) != 1 &&
            sscanf(argv[k], "-seed=%lu", &state) != 1 && argv[k][0] != '-')
            read_folder(argv[k]);
    if (count == 0)
        seeds[count++].size = 64;
    for (int k = 0; k < count; k++)
        LLVMFuzzerTestOneInput(seeds[k].bytes, seeds[k].size);
    const time_t begun = time(NULL);
    while ((runs < 0 || made < runs) && (seconds < 0 || time(NULL) - begun < seconds)) {
        LLVMFuzzerTestOneInput(bytes, mutate(bytes));
        made++;
    }
    printf("Done %ld runs of %d seeds\n", made, count);
    return 0;
}
