# ruff: noqa: E501 - a table, a way a line
"""Ways that differ in environment, directory, limits and arguments."""

from __future__ import annotations

from bench.parity.way import TOY, Way

QUICK = f"{TOY} --steps 30"
WORDS = "python {programs}/words.py"


def _env(name: str, tells: str, before: str = "", **more: object) -> Way:
    given = {"program": QUICK, "kind": "env", "seconds": 5.0, "err": True, **more}
    return Way(name=name, tells=tells, before=before, **given)  # type: ignore[arg-type]


SURROUNDINGS = [
    _env("plain", "nothing special"),
    _env("plain_beat", "nothing special, steps reported", program=f"{QUICK} --beat"),
    _env("no_home", "HOME is not set", "unset HOME"),
    _env("home_is_nowhere", "HOME is a directory that nobody can write", "export HOME=/proc"),
    _env("no_user", "USER and LOGNAME are not set", "unset USER LOGNAME"),
    _env("umask_077", "files are the user's alone", "umask 077"),
    _env("umask_777", "files have no permission at all", "touch ../meta/ranks; umask 777", program="bash {programs}/plain.sh"),
    _env("files_256", "256 descriptors", "ulimit -n 256"),
    _env("files_64", "64 descriptors", "ulimit -n 64"),
    _env("no_core", "no core files, a small stack", "ulimit -c 0; ulimit -s 4096"),
    _env("stack_unlimited", "an unlimited stack", "ulimit -s unlimited"),
    _env("file_size_100k", "no file larger than 100 kB", "ulimit -f 100"),
    _env("big_environment", "500 variables of 1 kB", 'for i in $(seq 500); do export BIG_$i=$(printf "%01000d" $i); done'),
    _env("big_variable", "a variable of 100 kB", 'export BIG=$(printf "%0100000d" 1)'),
    _env("odd_variables", "variables with newlines, quotes and bytes", "export ODD=$'a\\nb\\'\"\\xff=$'; export EMPTY="),
    _env("shell_function", "an exported shell function", "greet() { echo hello; }; export -f greet", program="bash -c 'greet; exec python {programs}/toy.py --steps 20'"),
    _env("lang_c", "LANG=C", "unset LC_ALL; export LANG=C"),
    _env("lang_unknown", "a locale that is not there", "export LC_ALL=xx_YY.UTF-8 LANG=xx_YY", err=False),
    _env("no_lang", "no locale", "unset LANG LC_ALL LC_CTYPE"),
    _env("bytes_as_words", "arguments that are no UTF-8", program=f"{WORDS} $'\\xff\\xfe' $'caf\\xe9' 'caf\u00e9'"),
    _env("odd_words", "arguments with spaces, quotes, stars, newlines, none", program=f"{WORDS} 'a b' \"it's\" '*' '' $'two\\nlines' '$HOME' '-n' '--' '--help'"),
    _env("long_words", "an argument of 100 kB", program=WORDS + ' $(printf "%0100000d" 7)'),
    _env("many_words", "5000 arguments", program=WORDS + " $(seq 5000)"),
    _env("options_like_ours", "arguments that look like robust-srun's options", program=f"{WORDS} --robust-verbose --robust-state-dir=x -N9 --nodes=7"),
    _env("path_minimal", "PATH has the system's programs alone", "here=$(command -v python); launcher=$(command -v {launcher}); export PATH=/usr/bin:/bin", lines="$launcher {options} $here {programs}/toy.py --steps 30"),
    _env("no_path", "PATH is not set", "here=$(command -v python); launcher=$(command -v {launcher}); unset PATH", lines="$launcher {options} $here {programs}/toy.py --steps 30"),
    _env("python_startup", "PYTHONSTARTUP names a file that fails", "echo 'raise SystemExit(9)' > ../meta/startup.py; export PYTHONSTARTUP=../meta/startup.py"),
    _env("python_warnings", "PYTHONWARNINGS=error", "export PYTHONWARNINGS=error"),
    _env("python_optimize", "PYTHONOPTIMIZE=2", "export PYTHONOPTIMIZE=2"),
    _env("python_dev_mode", "PYTHONDEVMODE=1", "export PYTHONDEVMODE=1", err=False),
    _env("python_verbose", "PYTHONVERBOSE=1", "export PYTHONVERBOSE=1", err=False),
    _env("python_no_site", "PYTHONNOUSERSITE=1 and PYTHONDONTWRITEBYTECODE=1", "export PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1"),
    _env("python_safe_path", "PYTHONSAFEPATH=1", "export PYTHONSAFEPATH=1 PYTHONPATH={programs}"),
    _env("python_hash_seed", "PYTHONHASHSEED=0 and PYTHONUNBUFFERED=1", "export PYTHONHASHSEED=0 PYTHONUNBUFFERED=1"),
    _env("python_utf8_off", "PYTHONUTF8=0 and PYTHONIOENCODING=latin-1", "export PYTHONUTF8=0 PYTHONIOENCODING=latin-1 LC_ALL=C"),
    _env("own_msgspec", "PYTHONPATH has a module named as one that robust-srun uses", "mkdir -p ../meta/own; echo 'raise RuntimeError(\"mine\")' > ../meta/own/msgspec.py; export PYTHONPATH=$(realpath ../meta/own)"),
    _env("own_sitecustomize", "PYTHONPATH has a sitecustomize of the user's", "mkdir -p ../meta/own; echo 'import os; os.environ[\"MINE\"] = \"1\"' > ../meta/own/sitecustomize.py; export PYTHONPATH=$(realpath ../meta/own)", program=f"{WORDS} --variable MINE"),
    _env("module_names_in_cwd", "the directory has modules named as the standard library's", "echo 'raise RuntimeError(\"mine\")' | tee json.py select.py uuid.py > msgspec.py"),
    _env("read_only_cwd", "the directory is read-only", "mkdir ../meta/ro; chmod 555 ../meta/ro; cd ../meta/ro", program=f"{WORDS} here"),
    _env("cwd_is_root", "the directory is /", "cd /", program=f"{WORDS} here"),
    _env("cwd_with_spaces", "the directory's name has spaces and quotes", "mkdir \"../meta/a 'b\"; cd \"../meta/a 'b\"", program=f"{WORDS} here"),
    _env("tmpdir_nowhere", "TMPDIR names no directory", "export TMPDIR=/nonexistent"),
    _env("timezone", "TZ is 14 hours ahead", "export TZ=Pacific/Kiritimati"),
    _env("proxies", "proxies that do not answer", "export http_proxy=http://192.0.2.1:3128 https_proxy=http://192.0.2.1:3128 all_proxy=socks5://192.0.2.1:1080"),
    _env("stdin_closed", "standard input is closed", lines="{launcher} {options} {program} <&-"),
    _env("stdin_null", "standard input is empty", lines="{launcher} {options} {program} < /dev/null"),
    _env("stdout_closed_later", "standard output goes to a pipe that ends early", lines="{launcher} {options} {program} --print | head -n 3 > ../meta/three; true", err=False),
    _env("stderr_to_stdout", "standard error goes with standard output", lines="{launcher} {options} {program} 2>&1 | grep -c '^rank'"),
    _env("in_a_pipe", "the output goes through tee", lines="set -o pipefail; {launcher} {options} {program} | tee log.txt | sort"),
    _env("strict_shell", "the script has set -euo pipefail", "set -euo pipefail"),
    _env("nice_10", "the launcher runs with nice 10", lines="nice -n 10 {launcher} {options} {program}"),
    _env("timeout_command", "the launcher runs below timeout", lines="timeout 120 {launcher} {options} {program}"),
    _env("setsid_command", "the launcher runs in a session of its own", lines="setsid -w {launcher} {options} {program}"),
    _env("nohup_command", "the launcher runs below nohup", lines="nohup {launcher} {options} {program} 2> /dev/null"),
    _env("background", "the launcher runs in the background, and the script waits", lines="{launcher} {options} {program} & wait $!"),
    _env("clean_environment", "the launcher gets Slurm's variables alone", lines="env -i PATH=\"$PATH\" $(env | grep -E '^(SLURM_[A-Z_]+|PARITY_RANKS|CHAOS_TOKEN|ROBUST_STATE_DIR|MASTER_[A-Z]+)=[^ ]*$') {launcher} {options} {program}"),
    _env("old_rank_variables", "RANK and WORLD_SIZE are those of another launcher", "export RANK=7 WORLD_SIZE=64 LOCAL_RANK=3"),
    _env("port_taken", "another program has the port that the script chose", "export MASTER_PORT=$((MASTER_PORT + 1)); python -c \"import socket,time; s=socket.create_server(('', $MASTER_PORT - 1)); time.sleep(20)\" & sleep 1"),
    _env("omp_threads", "OMP_NUM_THREADS=1 and GOMP_CPU_AFFINITY", "export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1"),
    _env("preload", "LD_PRELOAD of a library of the user's", "export LD_PRELOAD={programs}/csave.so"),
    _env("preload_missing", "LD_PRELOAD of a library that is not there", "export LD_PRELOAD=/nonexistent.so", err=False),
    _env("bash_env", "BASH_ENV prints a line", "echo 'echo from bash_env' > ../meta/bashrc; export BASH_ENV=$(realpath ../meta/bashrc)", program="bash -c 'exec python {programs}/toy.py --steps 20'"),
    _env("shm_full", "/dev/shm is full on all nodes", full="/dev/shm", kind="G", program=f"{QUICK} --beat", err=False),
    _env("tmp_full", "/tmp is full on all nodes", full="/tmp", program=f"{QUICK} --beat", err=False),
]  # fmt: skip
