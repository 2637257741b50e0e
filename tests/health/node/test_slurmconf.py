"""Host lists, slurm.conf and gres.conf as Slurm reads them."""

from __future__ import annotations

import pytest
from ClusterShell.NodeSet import NodeSet
from fake_system import FakeSystem, context
from hypothesis import given
from hypothesis import strategies as st

from health.node import slurmconf
from robust_slurm.hostlist import contains, expand

CONF = "/etc/slurm/slurm.conf"
GRES = "/etc/slurm/gres.conf"


def load(conf: str, node: str = "n1", **files: str) -> slurmconf.Conf:
    more = {f"/etc/slurm/{name.replace('_', '.')}": text for name, text in files.items()}
    return slurmconf.load(FakeSystem({CONF: conf} | more, context=context(node=node)))


# --- host lists


@st.composite
def ranges(draw: st.DrawFn) -> str:
    width = draw(st.integers(0, 3))
    low = draw(st.integers(0, 30))
    high = low + draw(st.integers(0, 12))
    single = draw(st.booleans())
    return f"{low:0{width}d}" if single else f"{low:0{width}d}-{high:0{width}d}"


@st.composite
def tokens(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(["n", "gpu-", "r1n", "a"]))
    for _ in range(draw(st.integers(0, 2))):
        text += "[" + ",".join(draw(st.lists(ranges(), min_size=1, max_size=3))) + "]"
        text += draw(st.sampled_from(["-ib", "n", ".x", "-"]))
    return text + draw(st.sampled_from(["", "7", "07", "[1-3]"]))


host_lists = st.lists(tokens(), min_size=1, max_size=3).map(",".join)


@given(host_lists)
def test_expand_is_what_clustershell_makes_of_it(expression: str) -> None:
    assert set(expand(expression)) == set(NodeSet(expression))


@given(host_lists, st.data())
def test_contains_is_membership(expression: str, data: st.DataObject) -> None:
    names = expand(expression)
    name = data.draw(st.sampled_from(names))
    assert contains(expression, name)
    at = data.draw(st.integers(0, len(name) - 1))
    other = name[:at] + data.draw(st.sampled_from(["", "0", "1", "9", "x"])) + name[at + 1 :]
    assert contains(expression, other) == (other in names)


@given(st.text(alphabet="n[]-,01 9", max_size=12), st.text(alphabet="n019", max_size=5))
def test_any_text_is_judged_or_refused(expression: str, node: str) -> None:
    try:
        names = expand(expression)
    except ValueError:
        with pytest.raises(ValueError):
            contains(expression, node)
    else:
        assert contains(expression, node) == (node in names)


@pytest.mark.parametrize(
    ("expression", "node", "inside"),
    [
        ("n1", "n1", True),
        ("n1", "n11", False),
        ("n[1-4,7]", "n7", True),
        ("n[1-4,7]", "n5", False),
        ("n[01-10]", "n1", False),
        ("n[01-10]", "n01", True),
        ("n[8-12]", "n12", True),
        ("n[8-12]", "n08", False),
        ("r[1-2]n[01-16]-ib", "r2n16-ib", True),
        ("r[1-2]n[01-16]-ib", "r2n16", False),
        ("n[1-2][1-2]", "n12", True),
        ("n[1-100][1-100]", "n100100", True),
        ("login, n[1-2]", "n2", True),
        ("", "n1", False),
        ("n[1-2", "n1", None),
        ("n1-2]", "n1", None),
        ("n[a-b]", "n1", None),
        ("n[4-1]", "n1", None),
        ("n[]", "n1", None),
        ("n1,x[", "n1", None),
    ],
)
def test_contains(expression: str, node: str, inside: bool | None) -> None:
    if inside is None:
        with pytest.raises(ValueError):
            contains(expression, node)
    else:
        assert contains(expression, node) is inside


def test_expand_has_a_limit() -> None:
    with pytest.raises(ValueError, match="more than"):
        expand("n[1-1000][1-1000]")
    assert contains("n[1-1000000000]", "n999999999")


# --- Gres=


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("", {}),
        ("gpu", {"": 1}),
        ("gpu:8", {"": 8}),
        ("gpu:h100:8", {"h100": 8}),
        ("gpu:h100", {"h100": 1}),
        ("gpu:h100:8(S:0-1),nic:2", {"h100": 8}),
        ("gpu:a100:4,gpu:t4:2,gpu:2", {"a100": 4, "t4": 2, "": 2}),
        ("gpu:a100:2(S:0),gpu:a100:2(S:1)", {"a100": 4}),
        ("shard:32,mps:400,gpu:2", {"": 2}),
        ("gpu:no_consume:2", {"": 2}),
        ("gpu:0", {"": 0}),
        ("gpu:1k", {"": 1024}),
        ("gpu:a100:2,gpu:8x,gpu:4", {"a100": 2}),
        ("gpuX:4,mygpu:3", {}),
    ],
)
def test_gres(gres: str, gpus: dict[str, int]) -> None:
    assert slurmconf.parse_gres(gres) == gpus


# --- slurm.conf


@pytest.mark.parametrize(
    ("conf", "gpus"),
    [
        ("NodeName=n[1-4] Gres=gpu:8", 8),
        ("nodename=n1 GRES=gpu:8 gres=gpu:4", 4),
        ('NodeName="n1" Gres="gpu:8"', 8),
        ("NodeName=n2 Gres=gpu:8", None),
        ("NodeName=n1 CPUs=4", 0),
        ("NodeName=n1 Gres=shard:8", 0),
        ("NodeName=DEFAULT Gres=gpu:8\nNodeName=n1", 8),
        ("NodeName=DEFAULT Gres=gpu:8\nNodeName=n1 Gres=gpu:4", 4),
        ("NodeName=n1\nNodeName=DEFAULT Gres=gpu:8", 0),
        ("NodeName=DEFAULT Gres=gpu:8\nNodeName=DEFAULT CPUs=4\nNodeName=n1", 8),
        ("NodeName=DEFAULT Gres=gpu:8\nNodeName=DEFAULT Gres=gpu:2\nNodeName=n1", 2),
        ("NodeName=n1 \\\n  CPUs=4 \\\n  Gres=gpu:8", 8),
        ("NodeName=n1 \\  # why\n  Gres=gpu:8", 8),
        ("NodeName=n1 # Gres=gpu:8", 0),
        ("# NodeName=n1 Gres=gpu:8\nNodeName=n1 Gres=gpu:2", 2),
        ("NodeName=n1 Gres=gpu:8\r\nNodeName=n2\r\n", 8),
        ("NodeName=n1 Feature=a\\#b Gres=gpu:8", 8),
        ("NodeName=n1 Gres=gpu:8 \\", 8),
        ("PartitionName=p Nodes=n1 Gres=gpu:1", None),
        ("", None),
    ],
)
def test_expected_gpus(conf: str, gpus: int | None) -> None:
    assert slurmconf.expected_gpus(FakeSystem({CONF: conf})) == gpus


def test_includes() -> None:
    conf = load(
        "ClusterName=Red\nInclude nodes.conf\ninclude %c.conf\nInclude /opt/gone.conf\n",
        nodes_conf="NodeName=DEFAULT Gres=gpu:8\n",
        red_conf="NodeName=n1 RealMemory=1000 TmpDisk=200\n",
    )
    assert conf.node and conf.node.gpus == {"": 8}
    assert conf.node.real_memory == 1000
    assert conf.problems == ("/opt/gone.conf: No such file or directory",)


def test_numbers_that_are_none() -> None:
    conf = load("NodeName=n1 RealMemory=1T Gres=gpu:2\n")
    assert conf.node and conf.node.real_memory == 0
    conf = load("NodeName=n1 RealMemory=\u00b2 Gres=gpu:2\n")
    assert conf.node and conf.node.real_memory == 0


def test_an_endless_include_ends() -> None:
    conf = load("Include slurm.conf\nNodeName=n1 Gres=gpu:2\n")
    assert conf.node and "deep" in conf.problems[0]


def test_where_it_is_looked_for() -> None:
    text = {path: f"NodeName=n1 Gres=gpu:{n}" for n, path in enumerate(slurmconf.PLACES)}
    for n, path in enumerate(slurmconf.PLACES):
        assert slurmconf.expected_gpus(FakeSystem(text)) == n
        del text[path]
    nothing = slurmconf.load(FakeSystem())
    assert nothing.path == "" and nothing.node is None and nothing.problems


def test_the_environment_wins_even_if_it_is_wrong() -> None:
    files = {CONF: "NodeName=n1 Gres=gpu:1", "/x/slurm.conf": "NodeName=n1 Gres=gpu:5"}
    there = FakeSystem(files, context=context(SLURM_CONF="/x/slurm.conf"))
    assert slurmconf.expected_gpus(there) == 5
    gone = FakeSystem(files, context=context(SLURM_CONF="/y/slurm.conf"))
    assert slurmconf.expected_gpus(gone) is None
    assert "/y/slurm.conf" in slurmconf.load(gone).problems[0]


def test_unreadable_is_said_and_the_next_place_is_not_an_excuse() -> None:
    system = FakeSystem(
        {CONF: PermissionError(13, "Permission denied")},
        context=context(SLURM_CONF=CONF),
    )
    assert slurmconf.load(system).problems == (f"{CONF}: Permission denied",)


def test_cluster_values_and_spool_dir() -> None:
    text = "AuthType=auth/munge\nSlurmdSpoolDir=/s/%n/%h\nNodeName=n1 NodeHostname=big-1\n"
    system = FakeSystem({CONF: text})
    assert slurmconf.load(system).values["authtype"] == "auth/munge"
    assert slurmconf.spool_dir(system) == "/s/n1/big-1"
    assert slurmconf.spool_dir(FakeSystem({CONF: ""})) == "/var/spool/slurmd"


def test_one_system_reads_once_and_another_is_read_anew() -> None:
    first = FakeSystem({CONF: "NodeName=n1 Gres=gpu:1"})
    assert slurmconf.load(first) is slurmconf.load(first)
    assert first.asked[f"read {CONF}"] == 1
    assert slurmconf.expected_gpus(FakeSystem({CONF: "NodeName=n1 Gres=gpu:2"})) == 2


@given(st.text(max_size=200))
def test_any_file_is_read_without_an_exception(text: str) -> None:
    slurmconf.load(FakeSystem({CONF: text}))


@given(
    st.lists(
        st.sampled_from(["NodeName=n1 ", "Gres=gpu:8", "\\", "\n", "#", " ", '"', "=", "Include x"])
    )
)
def test_any_pieces_are_read_without_an_exception(pieces: list[str]) -> None:
    gpus = slurmconf.expected_gpus(FakeSystem({CONF: "".join(pieces)}))
    assert gpus is None or gpus >= 0


# --- gres.conf


@pytest.mark.parametrize(
    ("gres", "files"),
    [
        ("Name=gpu File=/dev/nvidia[0-2]", ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2"]),
        ("NodeName=n[1-4] Name=gpu Type=h100 File=/dev/nvidia0", ["/dev/nvidia0"]),
        ("NodeName=n2 Name=gpu File=/dev/nvidia0", []),
        (
            "Name=nic File=/dev/x0\nName=gpu Files=/dev/nvidia1,/dev/nvidia3",
            ["/dev/nvidia1", "/dev/nvidia3"],
        ),
        (
            "Name=gpu File=/dev/nvidia0 Cores=0-3\nName=gpu File=/dev/nvidia0 Cores=4-7",
            ["/dev/nvidia0"],
        ),
        ("AutoDetect=nvml", []),
        ("Include more.conf", ["/dev/nvidia5"]),
    ],
)
def test_gpu_files(gres: str, files: list[str]) -> None:
    system = FakeSystem(
        {
            CONF: "NodeName=n1 Gres=gpu:3",
            GRES: gres,
            "/etc/slurm/more.conf": "Name=gpu File=/dev/nvidia5",
        }
    )
    assert slurmconf.gpu_files(system) == files


def test_no_gres_conf_names_no_files() -> None:
    assert slurmconf.gpu_files(FakeSystem({CONF: "NodeName=n1 Gres=gpu:3"})) == []
    assert slurmconf.gpu_files(FakeSystem()) == []


def test_mig_slices_are_counted_by_their_gpus() -> None:
    conf = "NodeName=n1 Gres=gpu:a100_1g.5gb:14,gpu:a100:1"
    lines = [
        f"Name=gpu Type=a100_1g.5gb MultipleFiles=/dev/nvidia{gpu},/dev/nvidia-caps/nvidia-cap{cap}"
        for gpu, cap in ((0, 21), (0, 30), (1, 156))
    ]
    gres = "\n".join([*lines, "Name=gpu Type=a100 File=/dev/nvidia2"])
    assert slurmconf.expected_gpus(FakeSystem({CONF: conf, GRES: gres})) == 3
    assert slurmconf.expected_gpus(FakeSystem({CONF: conf})) is None
