/* A debugger in small: attach to a process, hold or trace it for some seconds, and detach.
   trace PID SECONDS hold|run */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    pid_t pid = atoi(argv[1]);
    time_t end = time(NULL) + atoi(argv[2]);
    int status, run = !strcmp(argv[3], "run");
    if (ptrace(PTRACE_ATTACH, pid, 0, 0)) return perror("attach"), 1;
    waitpid(pid, &status, __WALL);
    if (!run) {
        sleep(end - time(NULL));
        ptrace(PTRACE_DETACH, pid, 0, 0); /* it may have been killed meanwhile */
        return 0;
    }
    while (time(NULL) < end) { /* from system call to system call, as strace does */
        ptrace(PTRACE_SYSCALL, pid, 0, 0);
        pid_t seen = 0;
        while (!seen && time(NULL) < end) {
            seen = waitpid(pid, &status, __WALL | WNOHANG);
            if (!seen) usleep(200);
        }
        if (seen < 0 || (seen && !WIFSTOPPED(status))) return 0; /* it has ended */
    }
    if (ptrace(PTRACE_DETACH, pid, 0, 0) == 0) return 0;
    kill(pid, SIGSTOP); /* it runs: a tracer detaches from a stopped process only */
    waitpid(pid, &status, __WALL);
    ptrace(PTRACE_DETACH, pid, 0, 0);
    kill(pid, SIGCONT);
    return 0;
}
