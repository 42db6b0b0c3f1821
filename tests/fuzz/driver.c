/* driver.c - main of core.c where the compiler has no libFuzzer: each file that is named is one input. */
#include <stdint.h>
#include <stdio.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int main(int argc, char **argv) {
    static uint8_t bytes[4096];
    for (int k = 1; k < argc; k++) {
        FILE *file = fopen(argv[k], "rb");
        if (!file) return 1;
        const size_t size = fread(bytes, 1, sizeof bytes, file);
        fclose(file);
        printf("%s\n", argv[k]);
        fflush(stdout);
        LLVMFuzzerTestOneInput(bytes, size);
    }
    return 0;
}
