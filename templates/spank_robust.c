/*
 * SPANK plugin: --robust[=off|observe|full] for srun, sbatch and salloc.
 *
 * sbatch and salloc only register the option; Slurm passes it on to each srun of the job. An srun
 * of such a job becomes robust-srun by execve, with the words and the environment that it was
 * started with. robust-srun does all the rest, and hands back to srun what is not for it.
 *
 * In slurmd and slurmstepd, which run as root, it does nothing. It runs no shell, writes no file
 * and trusts no variable: what it starts is named in plugstack.conf. Every failure leaves a plain
 * srun.
 *
 * `robust-admin install --plugin` compiles it for the Slurm release at hand.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(robust, 1)

#define MOST_BYTES (8u << 20) /* of a command line or an environment; the kernel takes 6 MiB */
#define TARGET "robust_srun="
#define PYTHON "python=" /* runs it untouched by the job's PYTHONHOME and PYTHONPATH */

#define TOLD "ROBUST_BY_PLUGIN" /* MODE:PATH for robust-srun, back:PID from it */
#define BACK "back:"
#define OURS "ROBUST_STEP_KEY" /* an srun that robust-srun has started, and no rank of it, has this */
/* Slurm's own variable, from which an srun in the job has the option. */
#define INHERITED "SLURM_SPANK__SLURM_SPANK_OPTION_robust_robust"
#define STRING(number) #number
#define AS_STRING(number) STRING(number)

/* Looked for in the file by robust-admin doctor. */
const char robust_built_for[] = "robust-built-for:" AS_STRING(SLURM_VERSION_NUMBER) ":";

enum mode { UNSET, OFF, OBSERVE, FULL };
static enum mode mode = UNSET;
static int handed_back; /* robust-srun has become this srun: the line is not for it */

static int take_mode(int value, const char *text, int remote)
{
	(void) value;
	if (remote)
		return 0;
	if (!text || !*text || !strcmp(text, "full") || !strcmp(text, "(null)"))
		mode = FULL;
	else if (!strcmp(text, "observe"))
		mode = OBSERVE;
	else if (!strcmp(text, "off"))
		mode = OFF;
	else {
		slurm_error("--robust=%.40s: use off, observe or full", text);
		return -1;
	}
	return 0;
}

static struct spank_option option = {
	"robust", "off|observe|full",
	"robust-slurm: keep the training running over faults (full, the default "
	"without a value), only detect and report them (observe), or neither (off)",
	2, 0, take_mode
};

/* Only the commands of users know the option; slurmd and slurmstepd pass it by. */
static int of_user(void)
{
	spank_context_t where = spank_context();
	return where == S_CTX_LOCAL || where == S_CTX_ALLOCATOR;
}

int slurm_spank_init(spank_t spank, int ac, char **av)
{
	const char *said;

	(void) ac;
	(void) av;
	if (!of_user())
		return 0;
	/* A job submitted from within a job is robust only if it asks for that itself. */
	if (spank_context() == S_CTX_ALLOCATOR)
		unsetenv(INHERITED);
	said = getenv(TOLD);
	if (said) {
		handed_back = !strncmp(said, BACK, strlen(BACK)) &&
			      atol(said + strlen(BACK)) == (long) getpid();
		unsetenv(TOLD);
	}
	if (spank_option_register(spank, &option) != ESPANK_SUCCESS)
		slurm_error("robust: --robust is not available");
	return 0;
}

/* The words in a file of /proc, ended by NULL. NULL: they cannot be read. Never freed: execve. */
static char **words_of(const char *path)
{
	size_t size = 0, room = 1 << 16, count = 0;
	char *text = malloc(room + 1);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t got = -1;

	if (text && fd >= 0)
		while ((got = read(fd, text + size, room - size)) > 0) {
			size += (size_t) got;
			if (size < room)
				continue;
			char *more = room < MOST_BYTES ? realloc(text, 2 * room + 1) : NULL;
			if (!more) {
				got = -1;
				break;
			}
			text = more;
			room *= 2;
		}
	if (fd >= 0)
		close(fd);
	if (got != 0 || !text)
		return NULL;
	text[size] = '\0';
	for (size_t i = 0; i < size; i++)
		count += !text[i];
	/* Room for two words before them, one behind, and NULL. */
	char **words = calloc(count + 5, sizeof(*words));
	if (!words)
		return NULL;
	words += 2;
	char *at = text;
	for (size_t i = 0; at < text + size; at += strlen(at) + 1)
		words[i++] = at;
	return words;
}

/* srun blocks these before it loads plugins; a program that it becomes must get them. */
static void unblock(void)
{
	static const int blocked[] = { SIGINT, SIGQUIT, SIGCONT, SIGTERM, SIGHUP, SIGALRM,
				       SIGUSR1, SIGUSR2, SIGPIPE, SIGWINCH };
	sigset_t set;

	sigemptyset(&set);
	for (size_t i = 0; i < sizeof(blocked) / sizeof(*blocked); i++)
		sigaddset(&set, blocked[i]);
	sigprocmask(SIG_UNBLOCK, &set, NULL);
}

/* True inside a step, the shell of salloc excepted: a rank's own srun is none of ours. */
static int in_step(void)
{
	const char *step = getenv("SLURM_STEP_ID");
	return step && *step && strtoul(step, NULL, 10) < 0xfffffff0ul;
}

int slurm_spank_init_post_opt(spank_t spank, int ac, char **av)
{
	const char *job = getenv("SLURM_JOB_ID"), *target = NULL;
	const char *python = NULL;
	static char told[PATH_MAX + 64];
	size_t kept = 0;
	ssize_t size, path_size;

	(void) spank;
	/* sbatch in a step's shell hands its number on to a job that it is not true of. */
	if (spank_context() == S_CTX_ALLOCATOR && (mode == FULL || mode == OBSERVE))
		unsetenv("SLURM_STEP_ID");
	if (spank_context() != S_CTX_LOCAL || (mode != FULL && mode != OBSERVE))
		return 0;
	if (handed_back || in_step() || getenv(OURS))
		return 0;
	if (!job || !*job) {
		if (!getenv(INHERITED)) /* it was typed */
			slurm_error("robust: --robust needs a job (sbatch --robust, salloc "
				    "--robust); plain srun goes on");
		return 0;
	}
	for (int i = 0; i < ac; i++)
		if (!strncmp(av[i], TARGET, strlen(TARGET)))
			target = av[i] + strlen(TARGET);
		else if (!strncmp(av[i], PYTHON, strlen(PYTHON)))
			python = av[i] + strlen(PYTHON);
	if (!target || *target != '/') {
		slurm_error("robust: plugstack.conf names no robust_srun=/path; plain srun goes on");
		return 0;
	}
	/* What srun has changed since it was started is not the user's. */
	char **words = words_of("/proc/self/cmdline");
	char **env = words_of("/proc/self/environ");
	if (!words || !words[0] || !env) {
		slurm_error("robust: /proc/self cannot be read; plain srun goes on");
		return 0;
	}
	for (size_t i = 0; env[i]; i++)
		if (strncmp(env[i], TOLD "=", strlen(TOLD "=")))
			env[kept++] = env[i];
	size = snprintf(told, sizeof(told), TOLD "=%s:", mode == FULL ? "full" : "observe");
	path_size = readlink("/proc/self/exe", told + size, PATH_MAX);
	told[size + (path_size > 0 ? path_size : 0)] = '\0';
	env[kept++] = told;
	env[kept] = NULL;
	words[0] = (char *) target;
	if (python && *python == '/' && !access(target, X_OK)) {
		*--words = "-I";
		*--words = (char *) python;
		target = python;
	}
	sigset_t before;
	sigprocmask(SIG_SETMASK, NULL, &before);
	unblock();
	execve(target, words, env);
	int why = errno;
	sigprocmask(SIG_SETMASK, &before, NULL);
	slurm_error("robust: %s: %s; plain srun goes on", target, strerror(why));
	return 0;
}
