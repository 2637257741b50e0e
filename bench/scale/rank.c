/* A rank that costs 0.1 MB: it beats once a step and does nothing else.
 *
 * rank DIR SECONDS: writes its heartbeat as robust_slurm/heartbeat.py does (robust_slurm/layout.py has the
 * record), one line to DIR/first_steps.jsonl at its first step, and as rank 0 each step to DIR/step.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SIZE = 256, RANK_AT = 20, PID_AT = 24, BEAT_AT = 64, EXPLICIT = 1 };

struct beat {
    uint64_t head;
    int64_t step;
    double time, loss, grad_norm;
    uint64_t source, tail;
};

static double now(clockid_t clock)
{
    struct timespec at;
    clock_gettime(clock, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

static const char *need(const char *name)
{
    const char *value = getenv(name);
    if (!value) {
        fprintf(stderr, "rank: %s is not set\n", name);
        exit(2);
    }
    return value;
}

static volatile char *claim(int rank)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s-%s.beat", need("ROBUST_BEAT_DIR"), need("ROBUST_EPOCH"),
             need("LOCAL_RANK"));
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (fd < 0 || fcntl(fd, F_SETLK, &lock) < 0) {
        perror(path);
        exit(2);
    }
    char *map = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED) {
        perror("mmap");
        exit(2);
    }
    int32_t pid = getpid(), number = rank;
    memcpy(map + RANK_AT, &number, sizeof number);
    memset(map + BEAT_AT, 0, SIZE - BEAT_AT);
    memcpy(map + PID_AT, &pid, sizeof pid);
    return map;
}

static void note_first_step(const char *dir, int rank)
{
    char path[4096], line[128];
    snprintf(path, sizeof path, "%s/first_steps.jsonl", dir);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    int size = snprintf(line, sizeof line, "{\"rank\": %d, \"time\": %.6f, \"step\": 1}\n", rank,
                        now(CLOCK_REALTIME));
    if (fd < 0 || write(fd, line, size) != size)
        perror(path);
    close(fd);
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: rank DIR SECONDS\n");
        return 2;
    }
    int rank = atoi(need("RANK")), steps = -1;
    double seconds = atof(argv[2]);
    struct timespec rest = {(time_t)seconds, (seconds - (time_t)seconds) * 1e9};
    volatile struct beat *beat = (volatile struct beat *)(claim(rank) + BEAT_AT);
    if (rank == 0) {
        char path[4096];
        snprintf(path, sizeof path, "%s/step", argv[1]);
        steps = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    }
    for (uint64_t step = 1;; step++) {
        nanosleep(&rest, NULL);
        beat->head = step;
        beat->step = step;
        beat->time = now(CLOCK_MONOTONIC);
        beat->loss = 1.0 / step;
        beat->grad_norm = 1.0;
        beat->source = EXPLICIT;
        beat->tail = step;
        if (step == 1)
            note_first_step(argv[1], rank);
        if (steps >= 0)
            dprintf(steps, "%12lu", (unsigned long)step), lseek(steps, 0, SEEK_SET);
    }
}
