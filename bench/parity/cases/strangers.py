# ruff: noqa: E501 - a table, a way a line
"""Programs of strangers: frameworks, launchers, wrappers, and programs with other processes."""

from __future__ import annotations

from bench.parity.way import TOY, Way

DDP = "python {programs}/ddp.py"
TORCH = ("*.pt", "*.tmp")
WRAPPED = "bash {programs}/wrap.sh"


def _torch(name: str, tells: str, program: str, **more: object) -> Way:
    given = {"heavy": True, "seconds": 25.0, "ignore": TORCH, **more}
    return Way(name=name, tells=tells, program=program, **{"kind": "user", **given})  # type: ignore[arg-type]


FRAMEWORKS = [
    _torch("ddp", "torch DDP with checkpoints of its own", DDP),
    _torch("ddp_evaluates", "torch DDP, an idle evaluation of 30 s", f"{DDP} --evaluate 30", seconds=50),
    _torch("ddp_saves", "torch DDP, rank 0 saves for 60 s while the others wait", f"{DDP} --save 60", seconds=80),
    _torch("ddp_one_late", "torch DDP, rank 1 joins after 45 s", f"{DDP} --late 45", seconds=65),
    _torch("ddp_from_scratch", "torch DDP that never resumes, an evaluation of 25 s", f"{DDP} --from-scratch --evaluate 25", kind="G", seconds=45),
    _torch("torchrun", "torchrun on each node", "torchrun --nnodes=2 --nproc-per-node=1 --rdzv-id=1 --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT {programs}/ddp.py", out=False),
    _torch("torchrun_four", "torchrun with two ranks on each node, an idle evaluation of 30 s", "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-id=1 --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT {programs}/ddp.py --evaluate 30", out=False, seconds=60),
    _torch("nanogpt", "nanoGPT's manner, below a wrapper", f"{WRAPPED} python {{programs}}/nanogpt.py"),
    _torch("nanogpt_evaluates", "nanoGPT's manner, evaluations of 20 s by rank 0", f"{WRAPPED} python {{programs}}/nanogpt.py 20", seconds=100),
    _torch("lightning", "Lightning with DDP and its own checkpoints", "python {programs}/light.py", ignore=("ckpt/*",), seconds=60),
    _torch("accelerate", "Accelerate, rank 0 uploads for 15 s", "python {programs}/accel.py", seconds=60),
    _torch("accelerate_launch", "accelerate launch on each node", "bash -c 'accelerate launch --cpu --num_machines 2 --num_processes 2 --machine_rank $SLURM_NODEID --main_process_ip $MASTER_ADDR --main_process_port $MASTER_PORT {programs}/accel.py'", out=False, seconds=60),
    _torch("transformers", "Hugging Face's Trainer", "python {programs}/trainer.py", ignore=("hf/*",), out=False, seconds=60),
    _torch("numpy_gloo", "numpy and gloo, rank 0 waits 30 s", "python {programs}/numbers_gloo.py 30", seconds=45),
    _torch("loader_workers", "a DataLoader with two workers, of which one is late by 30 s", "python {programs}/batches.py 30", seconds=45),
    _torch("mlm_example", "the project's own example, as a user copies it", "python {programs}/../train_lm.py --out lm --steps 20", before="cp {examples}/train_lm.py {examples}/speeches.py {shared}/ 2> /dev/null; cp -r {examples}/data {shared}/ 2> /dev/null; true", ignore=("lm/*",), out=False, seconds=60),
]  # fmt: skip


def _house(way: str, tells: str, **more: object) -> Way:
    given = {"seconds": 10.0, "program": f"python {{programs}}/household.py {way}", **more}
    return Way(name=way, tells=tells, **{"kind": "user", **given})  # type: ignore[arg-type]


PROCESSES = [
    _house("helper", "a helper leaves the session and ends 3 s after the program"),
    _house("replaced_worker", "a worker is killed, and the program starts another", kind="H"),
    _house("session", "a child in a session of its own works 25 s", seconds=35),
    _house("again", "the program replaces itself by itself"),
    _house("silent", "the program closes its standard output"),
    _house("pool", "a pool of processes"),
    _house("server", "rank 0 works 40 s, the others wait for its end", seconds=50),
    _house("zombies", "children that nobody reaps"),
    _house("threads", "threads work while the main thread waits 30 s", seconds=40),
    _house("kept_open", "a child keeps the output open"),
    _house("line_of_50_mb", "a rank prints a line of 50 MB", options="-N1 -n1", heavy=True),
    _house("term_ignored", "the program ignores SIGTERM"),
    _house("alarm", "a timer wakes the program 100 times a second"),
    _house("renamed", "the process changes its name"),
]
LAUNCHERS = [
    Way(name="bash_wrapper", kind="user", tells="a wrapper that derives torch's variables", program=f"{WRAPPED} {TOY}"),
    Way(name="bash_wrapper_waits", kind="user", tells="the same, and all ranks wait 40 s", program=f"{WRAPPED} {TOY} --wait sleep:30:40", seconds=46),
    Way(name="c_program", kind="user", tells="a program in C", program="{programs}/train 50"),
    Way(name="c_program_waits", kind="user", tells="a program in C that is idle for 40 s", program="{programs}/train 50 40", seconds=46),
    Way(name="shell_program", kind="user", tells="a shell script that sleeps 30 s", program="bash {programs}/plain.sh 30", seconds=32),
    Way(name="python_c", kind="user", tells="python -c", program="python -c \"import sys,time; sys.path.insert(0, '{programs}'); import here; here.started(); time.sleep(15); print('done')\"", seconds=17),
    Way(name="python_m", kind="user", tells="python -m of a module in the directory", program="python -m toy --steps 30", before="export PYTHONPATH={programs}"),
    Way(name="python_stdin", kind="user", tells="the program comes by standard input", program="python -", lines="{launcher} -N1 -n1 {program} < {programs}/words.py", before="export PYTHONPATH={programs}"),
    Way(name="python_flags", kind="user", tells="python -u -X faulthandler -W ignore", program="python -u -X faulthandler -W ignore {programs}/toy.py --steps 30"),
    Way(name="python_isolated", kind="user", tells="python -I -S", program="python -I -S -c \"import os,time; open(os.environ['PARITY_RANKS'],'a').write(' '.join((os.environ['SLURM_JOB_ID'],os.environ['SLURM_PROCID'],os.environ['SLURMD_NODENAME']))+chr(10)); time.sleep(3); print('done')\""),
    Way(name="env_python", kind="user", tells="env VARIABLE=1 python", program="env FOO=1 python {programs}/words.py --variable FOO"),
    Way(name="own_limits", kind="user", tells="a wrapper that sets 256 descriptors, nice and a umask", program="bash -c 'ulimit -n 256; umask 027; exec nice -n 5 python {programs}/toy.py --steps 30'"),
    Way(name="numbered_python", kind="user", tells="the system's python3, not the environment's", program="/usr/bin/python3 {programs}/toy.py --steps 30"),
    Way(name="namespace", kind="user", tells="a wrapper that makes a user and mount namespace, as containers do", program="unshare --user --map-root-user --mount python {programs}/toy.py --steps 30"),
    Way(name="pid_namespace", kind="user", tells="a wrapper that makes a PID namespace, and rank 1 waits 30 s", program="unshare --user --map-root-user --pid --fork python {programs}/toy.py --wait sleep:20:30:1", seconds=36),
    Way(name="perl", kind="user", tells="a program in Perl", program="perl {programs}/plain.pl"),
    Way(name="make", kind="user", tells="make -j runs the work", program="make -s -j2 -f {programs}/plain.mk", seconds=12),
    Way(name="script_command", kind="user", tells="the program below script(1), which gives it a terminal", program="script -qec 'python {programs}/toy.py --steps 30' /dev/null", out=False),
    Way(name="xargs", kind="user", tells="xargs starts the work of a rank", program="bash -c 'bash {programs}/plain.sh 0; seq 6 | xargs -P2 -I@ sh -c \"sleep 1; echo $SLURM_PROCID @\"'"),
]  # fmt: skip
STRANGERS = [*FRAMEWORKS, *PROCESSES, *LAUNCHERS]
