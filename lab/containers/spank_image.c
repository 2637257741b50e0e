/*
 * Stands in for Pyxis in tests: srun --container-image=DIRECTORY --container-mounts=SRC:DST[:FLAGS],…
 *
 * As Pyxis does, it puts each task into the image before the task's program is started. Unlike
 * Pyxis, it takes a directory, uses root's rights in place of a user namespace, gives each task a
 * mount namespace of its own, and leaves the environment as it is.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(image, 1)

static char *image, *mounts;

static int take(int value, const char *text, int remote)
{
	char **to = value ? &mounts : &image;

	(void) remote;
	free(*to);
	*to = text ? strdup(text) : NULL;
	return 0;
}

struct spank_option spank_options[] = {
	{"container-image", "DIRECTORY", "stand-in for Pyxis: the image", 1, 0, take},
	{"container-mounts", "SRC:DST,…", "stand-in for Pyxis: more mounts", 1, 1, take},
	SPANK_OPTIONS_TABLE_END
};

int slurm_spank_task_init_privileged(spank_t spank, int words, char **word)
{
	int status = -1;
	pid_t child;

	(void) spank;
	if (!image || words < 1)
		return 0;
	if (unshare(CLONE_NEWNS)) {
		slurm_error("image: unshare: %s", strerror(errno));
		return -1;
	}
	child = fork();
	if (!child) {
		execl("/bin/sh", "sh", word[0], image, mounts ? mounts : "", (char *) NULL);
		_exit(127);
	}
	if (child < 0 || waitpid(child, &status, 0) < 0 || status) {
		slurm_error("image: %s: mounts failed (%d)", image, status);
		return -1;
	}
	if (chroot("/mnt") || chdir("/")) {
		slurm_error("image: chroot: %s", strerror(errno));
		return -1;
	}
	return 0;
}
