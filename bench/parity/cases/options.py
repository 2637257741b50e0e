# ruff: noqa: E501 - a table, a way a line
"""Ways that differ in srun's options, in the job, and in how the program ends."""

from __future__ import annotations

from bench.parity.way import TOY, Way

QUICK = f"{TOY} --steps 30"
SHELL = "bash {programs}/plain.sh"
FAIL = "bash -c 'bash {programs}/plain.sh 1 %s'"
RANK_0_FAILS = (
    "bash -c 'bash {programs}/plain.sh $((3 + SLURM_PROCID * 8)) $((5 - SLURM_PROCID * 5))'"
)


def _option(name: str, tells: str, options: str = "", **more: object) -> Way:
    given = {"program": QUICK, "kind": "option", "seconds": 5.0, "err": True, **more}
    return Way(name=name, tells=tells, options=options, **given)  # type: ignore[arg-type]


OPTIONS = [
    _option("label", "lines with the number of their task", "-l"),
    _option("unbuffered", "output without a buffer", "-u", program=f"{QUICK} --print"),
    _option("output_file", "output to a file", "--output=all.txt"),
    _option("output_per_task", "output to a file per task", "-o out.%t -e err.%t", program=f"{QUICK} --print"),
    _option("output_none", "no output", "--output=none"),
    _option("append", "output appended to a file", "--open-mode=append -o log.%t", before="echo before > log.0"),
    _option("no_input", "no standard input", "--input=none"),
    _option("input_file", "standard input from a file", "--input=lines.txt", before="seq 20 > lines.txt", program="python {programs}/lines.py"),
    _option("input_pipe", "standard input from a pipe", program="python {programs}/lines.py", lines="seq 20 | {launcher} {options} {program}"),
    _option("input_slow", "standard input from a pipe that is slow", program="python {programs}/lines.py", lines="(for i in $(seq 10); do echo $i; sleep 4; done) | {launcher} {options} {program}", seconds=42),
    _option("kill_on_bad_exit", "KillOnBadExit=1", "--kill-on-bad-exit=1"),
    _option("wait_option", "--wait=60", "--wait=60"),
    _option("one_task", "one task on one node of two", "-N1 -n1"),
    _option("one_task_waits", "one task, which waits 30 s", "-N1 -n1", program=f"{TOY} --beat --wait sleep:30:30", seconds=36),
    _option("second_node", "the second node of the job", "-N1 -n1 -r1"),
    _option("node_list", "a node by its name", "-N1 -n1 -w $(scontrol show hostnames $SLURM_JOB_NODELIST | tail -n 1)"),
    _option("four_tasks", "two tasks on each node", "-n4 --ntasks-per-node=2", sbatch="--ntasks-per-node=2 --exclusive"),
    _option("cyclic", "tasks in turns", "-n4 -m cyclic", sbatch="--ntasks-per-node=2 --exclusive"),
    _option("uneven", "three tasks on two nodes", "-n3", sbatch="--ntasks-per-node=2 --exclusive"),
    _option("three_nodes", "three nodes", nodes=3),
    _option("three_nodes_wait", "three nodes, rank 2 waits 40 s", nodes=3, program=f"{TOY} --beat --wait sleep:30:40:2", seconds=46),
    _option("eight_tasks", "four tasks on each node", "-n8", sbatch="--ntasks-per-node=4 --exclusive"),
    _option("cpus_per_task", "four CPUs for each task", "-c4"),
    _option("cpu_bind", "no binding to CPUs", "--cpu-bind=none"),
    _option("memory", "a part of the memory", "--mem=1000"),
    _option("overlap", "a step that shares its resources", "--overlap"),
    _option("exact", "exactly the CPUs asked for", "--exact"),
    _option("step_limit", "a time limit of the step", "--time=5"),
    _option("step_name", "a name of the step", "--job-name=mine"),
    _option("export_some", "some variables", "--export=ALL,FOO=1", program="python {programs}/words.py --variable FOO"),
    _option("export_named", "named variables alone", "--export=PATH,PARITY_RANKS,CHAOS_TOKEN,MASTER_ADDR,MASTER_PORT,FOO", before="export FOO=1 BAR=2", program="python {programs}/words.py --variable BAR"),
    _option("chdir", "another directory", "--chdir=/usr", program="python {programs}/words.py here"),
    _option("mpi_none", "--mpi=none", "--mpi=none"),
    _option("no_kill_step", "--no-kill", "--no-kill"),
    _option("task_prolog", "a prolog and an epilog of each task", "--task-prolog={meta}/prolog.sh --task-epilog={meta}/prolog.sh", before="printf '#!/bin/sh\\necho print from the prolog of $SLURM_PROCID\\necho export MINE=1\\n' > ../meta/prolog.sh; chmod 755 ../meta/prolog.sh", program="python {programs}/words.py --variable MINE"),
    _option("verbose", "-v", "-v", err=False),
    _option("quiet", "-Q", "-Q"),
    _option("immediate", "--immediate=10", "--immediate=10"),
    _option("bcast", "the program is copied to each node first", "--bcast=/tmp/tmp-train", program="{programs}/train 20", kind="F", refusal="--bcast"),
    _option("multi_prog", "another program for each task", "--multi-prog", program="../meta/multi", before="printf '0 bash {programs}/plain.sh 1\\n1 bash {programs}/plain.sh 2\\n' > ../meta/multi", refusal="--multi-prog"),
    _option("signal_option", "--signal of the step, far from its end", "--signal=USR1@30 --time=10"),
    _option("by_variables", "options by SLURM_ variables", before="export SLURM_LABELIO=1 SLURM_CPU_BIND=none"),
]  # fmt: skip
JOBS = [
    _option("array", "a job array of two", sbatch="--ntasks-per-node=1 --exclusive --array=0-1", jobs=2, seconds=12, ignore=("final.json",)),
    _option("requeue_set", "sbatch --requeue", sbatch="--ntasks-per-node=1 --exclusive --requeue"),
    _option("no_requeue", "sbatch --no-requeue", sbatch="--ntasks-per-node=1 --exclusive --no-requeue"),
    _option("kill_by_slurm", "a job without --no-kill", sbatch="--ntasks-per-node=1 --exclusive --no-kill=off"),
    _option("singleton", "sbatch --dependency=singleton", sbatch="--ntasks-per-node=1 --exclusive --dependency=singleton"),
    _option("sbatch_export_none", "sbatch --export=NONE", sbatch="--ntasks-per-node=1 --exclusive --export=NONE", before="export PATH={venv}/bin:$PATH SLURM_EXPORT_ENV=ALL"),
    _option("overcommit", "four tasks on one CPU each", "-n4 --overcommit", sbatch="-n2 --exclusive"),
    _option("time_limit_signal", "Slurm warns before the time limit; the program saves and ends", sbatch="--ntasks-per-node=1 --exclusive --time=2 --signal=TERM@75", program="python {programs}/warned.py", seconds=60),
    _option("batch_signal", "Slurm signals the script, which ends the step well", sbatch="--ntasks-per-node=1 --exclusive --time=2 --signal=B:USR1@75", program="python {programs}/warned.py", before="trap 'scancel --signal=TERM $SLURM_JOB_ID.0; wait $step' USR1", lines="{launcher} {options} {program} & step=$!; wait $step; wait $step", seconds=60, err=False),
    _option("time_limit", "the job ends at its time limit", sbatch="--ntasks-per-node=1 --exclusive --time=1", program="sleep 300", lines="exec {launcher} {options} {program}", state="TIMEOUT", code=None, seconds=90, err=False),
    _option("four_steps", "four steps one after the other", lines="for i in 1 2 3 4; do {launcher} {options} {program} || exit; done", program=f"{SHELL} 1", seconds=8),
    _option("steps_at_once", "two steps at once, each on a node", lines="{launcher} -N1 -n1 -r0 {program} & {launcher} -N1 -n1 -r1 {program} & wait", program=f"{SHELL} 5", seconds=10),
    _option("steps_share_nodes", "two steps at once on the same nodes", lines="{launcher} --overlap {program} & {launcher} --overlap {program} & wait", program=f"{SHELL} 5", seconds=10),
    _option("step_beside_srun", "a plain step of srun beside it", lines="srun --overlap bash {programs}/plain.sh 3 & {launcher} --overlap {program}; wait", program=f"{SHELL} 5", seconds=10),
    _option("srun_within", "the program starts a step by srun itself", "-N1 -n1 --overlap", program="bash -c 'srun --overlap -N1 -n1 bash {programs}/plain.sh 2'", seconds=8),
    _option("steps_of_nothing", "four steps that do nothing", lines="for i in $(seq 4); do {launcher} -N1 -n1 true || exit; done; bash {programs}/plain.sh 0", seconds=8),
]  # fmt: skip


def _end(name: str, tells: str, code: int, program: str, **more: object) -> Way:
    given = {"seconds": 5.0, "state": "FAILED" if code else "COMPLETED", "err": True, **more}
    return Way(name=name, tells=tells, code=code, program=program, **{"kind": "exit", **given})  # type: ignore[arg-type]


ENDS = [
    _end("exit_3_at_end", "rank 1 ends with exit code 3 after its last step; it may be started again", 3, f"{TOY} --code 1:3", restarts=True, out=False, err=False),
    _end("exit_3_at_end_beat", "the same, steps reported", 3, f"{TOY} --beat --code 0:3", restarts=True, out=False, err=False),
    _end("exit_3_at_once", "all ranks end with 3 at once", 3, f"{SHELL} 0 3", kind="F"),
    _end("exit_3_after_5", "all ranks end with 3 after 5 s", 3, f"{SHELL} 5 3", kind="F", seconds=8),
    _end("exit_255", "all ranks end with 255", 255, f"{SHELL} 0 255", kind="F"),
    _end("exit_1_mid", "rank 1 fails at step 30; it may be started again", 1, f"{TOY} --beat --fail 1:30:1", restarts=True, err=False),
    _end("exit_7_mid", "rank 0 fails at step 30 with 7, steps not seen", 7, f"{TOY} --fail 0:30:7", restarts=True, err=False),
    _end("no_such_file", "python nosuch.py (srun makes argv[0] a whole path)", 2, "python nosuch.py", kind="F", err=False),
    _end("no_such_program", "a program that is not there", 2, "no-such-program", kind="F", err=False),
    _end("not_executable", "a file that may not be run", 13, "{programs}/toy.py", kind="F", err=False),
    _end("no_such_module", "python -m nosuch", 1, "python -m nosuch", kind="F"),
    _end("import_error", "a module that is not there", 1, "python -c 'import nosuch_module'", kind="F"),
    _end("syntax_error", "a syntax error", 1, "python -c 'x = = 1'", kind="F"),
    _end("bad_option", "an option that the program does not know", 2, f"{TOY} --nonsense", kind="F"),
    _end("no_checkpoint", "a checkpoint that is not there", 1, "python -c 'open(\"ckpt.pt\")'", kind="F"),
    _end("no_launch_option", "an option that srun does not know", 255, QUICK, options="--nonsense", kind="F", err=False),
    _end("no_such_node", "a node that is not there", 1, QUICK, options="-w nowhere", kind="F", err=False),
    _end("keep_on_bad_exit_all", "all ranks end with 3 after 2 s, --kill-on-bad-exit=0", 3, f"{SHELL} 2 3", options="--kill-on-bad-exit=0", kind="F"),
    _end("kill_on_bad_exit_all", "the only rank ends with 3 after 2 s, --kill-on-bad-exit=1", 3, f"{SHELL} 2 3", options="-N1 -n1 --kill-on-bad-exit=1", kind="F"),
    _end("keep_on_bad_exit_one", "rank 0 ends with 5 after 3 s, rank 1 with 0 after 11 s, --kill-on-bad-exit=0; it may be started again", 5, RANK_0_FAILS, options="--kill-on-bad-exit=0", kind="F", seconds=13, restarts=True, out=False, err=False),
    _end("kill_on_bad_exit_one", "rank 0 ends with 5 after 3 s, so rank 1 is ended, --kill-on-bad-exit=1; it may be started again", 143, RANK_0_FAILS, options="--kill-on-bad-exit=1", kind="F", restarts=True, out=False, err=False),
    _end("keep_on_bad_exit_file", "python nosuch.py, --kill-on-bad-exit=0", 2, "python nosuch.py", options="--kill-on-bad-exit=0", kind="F", err=False),
    _end("kill_on_bad_exit_file", "python nosuch.py by one task, --kill-on-bad-exit=1", 2, "python nosuch.py", options="-N1 -n1 --kill-on-bad-exit=1", kind="F", err=False),
    _end("true", "a program that does nothing", 0, "true"),
    _end("early_stop", "the program stops before its planned end, with 0", 0, f"{TOY} --steps 5"),
    _end("last_rank_fails_alone", "independent tasks, of which one ends with 4; it may be started again", 4, "bash -c 'bash {programs}/plain.sh $((SLURM_PROCID * 2)) $((SLURM_PROCID * 4))'", restarts=True, out=False, err=False),
]  # fmt: skip
