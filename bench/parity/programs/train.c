/* A training in C: each rank writes a note at its start and a result at its end. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv) {
    const char *rank = getenv("SLURM_PROCID"), *job = getenv("SLURM_JOB_ID");
    const char *node = getenv("SLURMD_NODENAME");
    int steps = argc > 1 ? atoi(argv[1]) : 50, pause = argc > 2 ? atoi(argv[2]) : 0;
    char name[64];
    double sum = 1.0;
    FILE *ranks = fopen(getenv("PARITY_RANKS"), "a");
    fprintf(ranks, "%s %s %s\n", job, rank, node);
    fclose(ranks);
    for (int i = 1; i <= steps; i++) {
        usleep(100000);
        if (i == steps / 2) sleep(pause);
        sum = sum * 0.99 + i;
        printf("rank %s step %d\n", rank, i);
    }
    snprintf(name, sizeof name, "result.%s", rank);
    FILE *result = fopen(name, "w");
    fprintf(result, "%.9f\n", sum);
    return fclose(result);
}
