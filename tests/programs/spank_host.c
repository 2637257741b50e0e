/* Stands for srun, sbatch, salloc or slurmstepd: loads a SPANK plugin and calls it as they do.
 * spank_host PLUGIN CONTEXT (local, allocator, remote, slurmd) VALUE (- for none) ARGUMENT ... */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <slurm/spank.h>

static spank_context_t context;
static struct spank_option *registered;

spank_context_t spank_context(void) { return context; }
void slurm_error(const char *format, ...);
void slurm_error(const char *format, ...)
{
	va_list list;
	va_start(list, format);
	vfprintf(stderr, format, list);
	va_end(list);
	fputc('\n', stderr);
}
spank_err_t spank_option_register(spank_t spank, struct spank_option *option)
{
	(void) spank;
	registered = option;
	return ESPANK_SUCCESS;
}

int main(int argc, char **argv)
{
	const char *names[] = { "error", "local", "remote", "allocator", "slurmd", "job_script" };
	void *plugin = argc > 3 ? dlopen(argv[1], RTLD_LAZY) : NULL;
	spank_f *init, *post;
	sigset_t set;

	if (!plugin)
		return fprintf(stderr, "%s\n", dlerror()), 9;
	for (int i = 0; i < 6; i++)
		if (!strcmp(names[i], argv[2]))
			context = (spank_context_t) i;
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGURG);
	sigprocmask(SIG_BLOCK, &set, NULL);
	init = (spank_f *) dlsym(plugin, "slurm_spank_init");
	post = (spank_f *) dlsym(plugin, "slurm_spank_init_post_opt");
	if (init(NULL, argc - 4, argv + 4))
		return 8;
	if (registered && strcmp(argv[3], "-") &&
	    registered->cb(0, strcmp(argv[3], "null") ? argv[3] : NULL, 0))
		return 7;
	if (post(NULL, argc - 4, argv + 4))
		return 6;
	printf("srun registered=%d told=%s inherited=%s step=%s\n", registered != NULL,
	       getenv("ROBUST_BY_PLUGIN") ? "yes" : "no",
	       getenv("SLURM_SPANK__SLURM_SPANK_OPTION_robust_robust") ? "yes" : "no",
	       getenv("SLURM_STEP_ID") ? "yes" : "no");
	return 0;
}
