"""The number of GPUs: Slurm against the PCI bus against NVML; and an NVML that is silent."""

from __future__ import annotations

from typing import Any

import pytest
from fake_gpus import ADDRESSES, PCI, gpu_node, h100, pci_files, snapshot
from fake_system import FakeSystem, context

from health.checks.gpu.gpu_count import CHECK
from health.checks.gpu.nvml import CHECK as NVML
from health.children import child
from health.finding import Finding
from health.nvidia import gpus

DRIVER = "/proc/driver/nvidia/version"
CONF = "/etc/slurm/slurm.conf"
DENIED = PermissionError(13, "Permission denied")


def said(findings: list[Finding]) -> list[str]:
    return [f"{f.check} {f.status} {f.device}".strip() for f in findings]


def node(pci: int = 8, nvml: int = 8, gres: str | None = "gpu:h100:8", **over: Any) -> FakeSystem:
    """``pci`` GPUs on the bus, the first ``nvml`` of them in NVML, ``gres`` in slurm.conf."""
    devices = [h100(i) for i in range(pci)]
    over.setdefault("snapshot", snapshot(devices[:nvml]))
    system = gpu_node(devices, gres or "", **over)
    for i in range(8):
        system.files[f"/dev/nvidia{i}"] = ""
    return system


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (node(), []),
        (node(7, 7), ["gpu-missing FAIL"]),
        (node(8, 7), [f"gpu-lost FAIL {ADDRESSES[7]}"]),
        (node(8, 6), [f"gpu-lost FAIL {ADDRESSES[6]}", f"gpu-lost FAIL {ADDRESSES[7]}"]),
        (node(7, 6), ["gpu-missing FAIL", f"gpu-lost FAIL {ADDRESSES[6]}"]),
        (node(gres="gpu:4"), ["gpu-unconfigured WARN"]),
        (node(gres=""), ["gpu-unconfigured WARN"]),
        (node(gres="", nvml=7), ["gpu-unconfigured WARN"]),
        (node(gres="gpu:4", nvml=7), ["gpu-unconfigured WARN", f"gpu-lost FAIL {ADDRESSES[7]}"]),
        # the site's word wins over Slurm's
        (node(options={"gpu_count": {"expected": 4}}, pci=4, nvml=4), []),
        (node(options={"gpu_count": {"expected": 0}}), ["gpu-unconfigured WARN"]),
        (node(gres="gpu:4", options={"gpu_count": {"expected": 9}}), ["gpu-missing FAIL"]),
        # nobody says how many: closed only where there is an NVIDIA device
        (node(context=context(node="dyn-7")), ["gpu-count-unknown ERROR"]),
        (
            node(context=context(node="dyn-7"), nvml=7),
            ["gpu-count-unknown ERROR", f"gpu-lost FAIL {ADDRESSES[7]}"],
        ),
        (node(context=context(node="dyn-7"), options={"gpu_count": {"expected": 8}}), []),
        (FakeSystem(pci_files("0000:00:1f.0", "0x060100", "0x8086")), ["gpu-count-unknown WARN"]),
        (FakeSystem(), ["gpu-count-unknown WARN"]),
        # slurm.conf cannot be read, no GPU is on the bus, and there were some
        (FakeSystem({DRIVER: "NVRM"}), ["gpu-count-unknown ERROR"]),
        (FakeSystem(context=context(SLURM_JOB_GPUS="0,1")), ["gpu-count-unknown ERROR"]),
        (FakeSystem({DRIVER: "NVRM"}, context=context("sweep")), ["gpu-count-unknown WARN"]),
        (
            FakeSystem({CONF: DENIED} | pci_files(ADDRESSES[0])),
            ["gpu-count-unknown ERROR", f"gpu-lost FAIL {ADDRESSES[0]}"],
        ),
        # what cannot be read is not "no GPU"
        (node(fail={PCI: DENIED}), ["gpu-pci-unreadable ERROR"]),
        (node(gres="", fail={PCI: DENIED}), ["gpu-pci-unreadable ERROR"]),
        (FakeSystem({CONF: "NodeName=n1 Gres=gpu:8"}), ["gpu-pci-unreadable ERROR"]),
        (
            node(files={f"{PCI}/{ADDRESSES[2]}/vendor": OSError(5, "Input/output error")}),
            ["gpu-pci-unreadable ERROR"],
        ),
        # a node without GPUs
        (FakeSystem({CONF: "NodeName=n1"} | pci_files("0000:00:1f.0", "0x060100", "0x8086")), []),
        (FakeSystem({CONF: "NodeName=n1"}), []),
        # Slurm counts MIG slices
        (node(gres="gpu:1g.10gb:56"), []),
        (node(gres="gpu:1g.10gb:56", nvml=7), [f"gpu-lost FAIL {ADDRESSES[7]}"]),
        (
            node(gres="gpu:1g.10gb:56", files={"/etc/slurm/gres.conf": "AutoDetect=nvml"}),
            ["gpu-count-slices WARN"],
        ),
        (
            node(
                7,
                7,
                gres="gpu:1g.10gb:56",
                files={"/etc/slurm/gres.conf": "Name=gpu File=/dev/nvidia[0-7]"},
            ),
            ["gpu-missing FAIL"],
        ),
        # broken gres.conf
        (node(files={"/etc/slurm/gres.conf": DENIED}), ["gpu-count-unknown ERROR"]),
        (
            node(files={"/etc/slurm/gres.conf": "Name=gpu File=/dev/nvidia[0-"}),
            ["gpu-count-unknown ERROR"],
        ),
    ],
)
def test_counts(system: FakeSystem, expected: list[str]) -> None:
    assert said(CHECK.run(system)) == expected


def test_the_evidence_says_what_was_compared() -> None:
    lost = CHECK.run(node(8, 7))[0]
    assert lost.evidence == (
        f"{ADDRESSES[7]} is not among them: NVML shows 7 of 8 GPUs on the PCI bus"
    )
    missing = CHECK.run(node(7, 7, snapshot=snapshot([h100(i) for i in range(8)])))[0]
    assert missing.evidence == (
        f"7 GPUs on the PCI bus, 8 configured ({CONF}); gone from it: {ADDRESSES[7]}"
    )
    zero = CHECK.run(node(options={"gpu_count": {"expected": 0}}))[0]
    assert zero.evidence.endswith("0 configured ([health.gpu_count] expected)")
    unknown = CHECK.run(node(context=context(node="dyn-7")))[0]
    assert "no NodeName line" in unknown.evidence and "expected" in unknown.evidence


def test_what_may_come_after_slurmd_has_started_asks_for_no_reboot() -> None:
    """A node that was looked at too early after its boot must not stay drained for good."""
    system = node(snapshot={"stage": "init", "error": "NVML_ERROR_DRIVER_NOT_LOADED"})
    del system.files["/dev/nvidia5"]
    found = [*CHECK.run(system), *NVML.run(system)]
    assert {finding.check for finding in found} == {"gpu-device-file", "driver-not-loaded"}
    assert {(finding.status, finding.action) for finding in found} == {("FAIL", "none")}


def others(*kinds: tuple[str, str], gres: str = "gpu:mi300x:8") -> FakeSystem:
    """A node with devices of these (class, vendor), whose NVML has no library."""
    files = {CONF: f"NodeName=n1 Gres={gres}", "/etc/slurm/gres.conf": "Name=gpu File=/dev/dri/r0"}
    for number, (kind, vendor) in enumerate(kinds):
        files |= pci_files(f"0000:{number:02x}:00.0", kind, vendor)
    return FakeSystem(files, snapshot={"stage": "init", "error": "no-library"})


@pytest.mark.parametrize(
    ("kinds", "gres"),
    [
        ([("0x120000", "0x1002")] * 8 + [("0x030000", "0x1a03")], "gpu:mi300x:8"),
        ([("0x038000", "0x1002")] * 4, "gpu:4"),
        ([("0x120000", "0x1da3")] * 8, "gpu:gaudi2:8"),
    ],
)
def test_gpus_of_another_vendor_are_not_missed(kinds: list[tuple[str, str]], gres: str) -> None:
    system = others(*kinds, gres=gres)
    assert said(CHECK.run(system)) == ["gpu-other-vendor WARN"]
    assert NVML.run(system) == []


@pytest.mark.parametrize(
    "kinds",
    [
        [("0x120000", "0x1002")] * 7,  # one of them is gone
        [("0x030000", "0x1002")] * 8,  # displays
        [("0x030000", "0x1a03")],  # the BMC's
        [("0x120000", "0x1002")] * 8 + [("0x030200", "0x10de")],
    ],
)
def test_another_vendors_devices_do_not_stand_in_for_lost_gpus(
    kinds: list[tuple[str, str]],
) -> None:
    system = others(*kinds)
    assert "gpu-missing FAIL" in said(CHECK.run(system))
    assert said(NVML.run(system)) == ["nvml-unusable ERROR"]


def test_a_device_file_is_missing() -> None:
    system = node()
    del system.files["/dev/nvidia5"]
    assert said(CHECK.run(system)) == ["gpu-device-file FAIL /dev/nvidia5"]


@pytest.mark.parametrize("word", ["GPU Excluded:\t Yes", "GPU Blacklisted:   Yes"])
def test_a_gpu_that_the_site_excluded_is_not_lost(word: str) -> None:
    path = f"/proc/driver/nvidia/gpus/{ADDRESSES[7]}/information"
    assert CHECK.run(node(8, 7, files={path: f"Model: X\n{word}\n"})) == []


@pytest.mark.parametrize(
    ("driver", "expected"),
    [("vfio-pci", []), ("nouveau", []), ("nvidia", ["gpu-unconfigured", "gpu-lost"])],
)
def test_a_gpu_of_another_driver_is_not_ours(driver: str, expected: list[str]) -> None:
    extra = "0000:e9:00.0"
    links = {f"{PCI}/{extra}/driver": f"../../../bus/pci/drivers/{driver}"}
    system = node(files=pci_files(extra, "0x030000"), links=links)
    assert [f.check for f in CHECK.run(system)] == expected


def test_virtual_functions_and_other_nvidia_devices_do_not_count() -> None:
    files = pci_files("0000:1b:00.4") | pci_files("0000:05:00.0", "0x068000")  # VF, NVSwitch
    links = {f"{PCI}/0000:1b:00.4/physfn": "../0000:1b:00.0"}
    assert CHECK.run(node(files=files, links=links)) == []


def test_a_device_taken_out_meanwhile_is_passed_over() -> None:
    gone = {f"{PCI}/0000:00:00.0/vendor": FileNotFoundError(2, "gone")}
    assert CHECK.run(node(files=gone)) == []


def test_a_gpu_whose_handle_failed_is_left_to_the_family_nvml() -> None:
    for pci in (ADDRESSES[7], ""):
        lost = [{"index": 7, "pci": pci, "error": "NVML_ERROR_UNKNOWN"}]
        system = node(8, snapshot=snapshot([h100(i) for i in range(7)], lost=lost, count=8))
        assert CHECK.run(system) == []
        (found,) = NVML.run(system)
        assert said([found]) == ["gpu-gone FAIL gpu7"] and ADDRESSES[7] in found.evidence


def test_lost_gpus_get_the_addresses_that_are_left_in_their_order() -> None:
    error = "NVML_ERROR_UNKNOWN"
    devices = [h100(i) for i in (0, 2, 3, 4, 5, 7)]
    lost = [{"index": i, "pci": "", "error": error} for i in (1, 6)]
    found = NVML.run(node(8, snapshot=snapshot(devices, lost=lost, count=8)))
    assert [ADDRESSES[i] in f.evidence for i, f in zip((1, 6), found, strict=True)] == [True] * 2
    # one more is missing: nobody knows which is which
    found = NVML.run(node(8, snapshot=snapshot(devices[1:], lost=lost, count=7)))
    assert not any("0000:" in f.evidence for f in found)
    found = NVML.run(node(8, snapshot=snapshot(devices, lost=lost), fail={PCI: DENIED}))
    assert len(found) == 2 and not any("0000:" in f.evidence for f in found)


@pytest.mark.parametrize(
    "over", [{"hung": True, "stage": "gpu3 ecc"}, {"error": "NVML_ERROR_UNKNOWN", "stage": "init"}]
)
def test_what_nvml_did_not_come_to_tell_is_not_lost(over: dict[str, Any]) -> None:
    system = node(8, snapshot=snapshot([h100(0)], **over))
    assert CHECK.run(system) == []
    assert len(NVML.run(system)) == 1


# --- NVML is asked only where GPUs are wanted


@pytest.mark.parametrize(
    ("system", "wanted"),
    [
        (node(), True),
        (node(0, 0), True),
        (node(options={"gpu_count": {"expected": 0}}, gres="gpu:8", files={}), True),
        (
            FakeSystem({CONF: "NodeName=n1 Gres=gpu:8"}, options={"gpu_count": {"expected": 0}}),
            False,
        ),
        (node(gres=""), True),
        (node(context=context(node="dyn-7")), True),
        (
            FakeSystem({CONF: "NodeName=n1"} | pci_files("0000:00:1f.0", "0x060100", "0x8086")),
            False,
        ),
        (
            FakeSystem({CONF: "NodeName=n1"} | pci_files(ADDRESSES[0])),
            False,
        ),  # a display, no driver
        (FakeSystem(pci_files(ADDRESSES[0])), True),
        (FakeSystem({CONF: "NodeName=n1"}), False),
        (FakeSystem(), False),
        (FakeSystem(fail={PCI: DENIED}), True),
        (FakeSystem({CONF: "NodeName=n1"}, fail={PCI: DENIED}), False),
    ],
)
def test_wanted(system: FakeSystem, wanted: bool) -> None:
    assert gpus.wanted(system) is wanted
    assert system.asked["nvml"] == 0


def test_where_gpus_are_configured_the_bus_is_not_read_for_it() -> None:
    system = node()
    assert gpus.wanted(system)
    assert not any(PCI in question for question in system.asked)


# --- nvml


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ({}, []),
        ({"hung": True, "stage": "init"}, ["nvml-hung FAIL"]),
        ({"hung": True, "stage": "gpu3 ecc (D nv_open)"}, ["nvml-hung FAIL gpu3"]),
        ({"hung": True, "killed": False, "stage": "init"}, ["nvml-hung FAIL"]),
        ({"hung": True, "killed": True, "stage": "init"}, ["nvml-slow FAIL"]),
        ({"hung": True, "killed": True, "stage": "gpu3 ecc (S)"}, ["nvml-slow FAIL gpu3"]),
        ({"stage": "init", "error": "NVML_ERROR_DRIVER_NOT_LOADED"}, ["driver-not-loaded FAIL"]),
        (
            {"stage": "init", "error": "NVML_ERROR_LIB_RM_VERSION_MISMATCH"},
            ["driver-mismatch FAIL"],
        ),
        ({"stage": "init", "error": "NVML_ERROR_UNKNOWN"}, ["nvml-failed FAIL"]),
        ({"stage": "count", "error": "NVML_ERROR_GPU_IS_LOST"}, ["nvml-failed FAIL"]),
        ({"stage": "init", "error": "no-library"}, ["nvml-unusable ERROR"]),
        ({"stage": "import", "error": "no-pynvml"}, ["nvml-unusable ERROR"]),
        ({"stage": "gpu3 ecc", "error": "died-signal-11"}, ["nvml-unusable ERROR"]),
        ({"stage": "gpu3 ecc"}, ["nvml-unusable ERROR"]),
        (
            {"lost": [{"index": 3, "pci": ADDRESSES[3], "error": "NVML_ERROR_GPU_IS_LOST"}]},
            ["gpu-gone FAIL gpu3"],
        ),
        (
            {"lost": [{"index": 3, "error": "NVML_ERROR_RESET_REQUIRED"}]},
            ["gpu-reset-required FAIL gpu3"],
        ),
        (
            {"lost": [{"index": 3, "error": "NVML_ERROR_INSUFFICIENT_POWER"}]},
            ["gpu-power-cable FAIL gpu3"],
        ),
        (
            {
                "hung": True,
                "stage": "gpu4 ecc",
                "lost": [{"index": 3, "error": "NVML_ERROR_UNKNOWN"}],
            },
            ["nvml-hung FAIL gpu4", "gpu-gone FAIL gpu3"],
        ),
    ],
)
def test_nvml(over: dict[str, Any], expected: list[str]) -> None:
    devices = [] if over.get("stage") in ("init", "count", "import") else [h100(0)]
    found = NVML.run(node(snapshot=snapshot(devices, **over)))
    assert said(found) == expected
    if over.get("stage"):
        assert over["stage"] in found[0].evidence
    assert NVML.closes_on_error


def test_what_to_install_is_said() -> None:
    for error, word in (("no-pynvml", "nvidia-ml-py"), ("no-library", "libnvidia-ml.so.1")):
        (found,) = NVML.run(node(snapshot=snapshot([], stage="init", error=error)))
        assert word in found.evidence and found.cls == "tool"


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("init (state D)", ["5.0 s", "persistence mode", "nvidia-persistenced", "nvml_deadline"]),
        ("gpu3 ecc", ["5.0 s", "persistence mode", "nvml_deadline"]),
    ],
)
def test_slow_nvml_says_how_long_it_took_and_what_to_do(stage: str, words: list[str]) -> None:
    slow = {"hung": True, "killed": True, "waited": 5.02, "stage": stage}
    (found,) = NVML.run(node(snapshot=snapshot([], **slow)))
    assert (found.cls, found.action) == ("node", "none")
    assert all(word in found.evidence for word in [stage, *words])
    (found,) = NVML.run(node(snapshot=snapshot([], **slow | {"killed": False})))
    assert (found.check, found.action) == ("nvml-hung", "reboot") and stage in found.evidence


@pytest.mark.parametrize(
    ("where", "cls", "action"),
    [
        ("state D in nv_open (driver nvidia)", "node", "reboot"),
        (f"state D in nv_open {child.OTHERS}", "user", "none"),
        ("state D in rpc_wait_bit_killable", "user", "none"),
        ("state D in request_wait_answer", "node", "reboot"),  # the gate's own: no user's daemon
    ],
)
def test_nvml_that_hangs_for_others_is_no_nodes_fault(where: str, cls: str, action: str) -> None:
    hung = {"hung": True, "killed": False, "waited": 5.0, "stage": f"init ({where})"}
    (found,) = NVML.run(node(snapshot=snapshot([], **hung)))
    assert (found.check, found.cls, found.action) == ("nvml-hung", cls, action)


@pytest.mark.parametrize("stage", ["slurm.conf (state D in rpc_wait)", "import", "fork"])
@pytest.mark.parametrize("killed", [True, False])
def test_a_collector_that_did_not_get_to_nvml_blames_no_driver(stage: str, killed: bool) -> None:
    hung = {"hung": True, "killed": killed, "waited": 5.02, "stage": stage}
    (found,) = NVML.run(node(snapshot=snapshot([], **hung)))
    assert (found.status, found.check, found.cls, found.action) == (
        "FAIL",
        "nvml-unusable",
        "tool",
        "none",
    )
    assert "file system" in found.evidence


def test_broken_nvml_on_a_node_without_gpus_is_nothing() -> None:
    for over in ({"hung": True, "stage": "init"}, {"error": "no-library", "stage": "init"}):
        system = FakeSystem({CONF: "NodeName=n1"}, snapshot=snapshot([], **over))
        assert NVML.run(system) == []
