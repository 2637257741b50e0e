/* A save of 5 MB/s in one C call, as torch.save writes one large record. */
#include <fcntl.h>
#include <unistd.h>

static char block[1 << 20];

int save(const char *path, int seconds) {
    int file = open(path, O_CREAT | O_WRONLY | O_TRUNC, 0644);
    if (file < 0) return -1;
    for (int i = 0; i < seconds * 5; i++) {
        lseek(file, 0, SEEK_SET);
        if (write(file, block, sizeof block) < 0) return -1;
        fsync(file);
        usleep(190000);
    }
    close(file);
    return unlink(path);
}
