"""The state of a node by its events: what is open, what came back, lemons, proofs."""

from __future__ import annotations

from typing import Any

import pytest
from node_events import GPU, NOW, OTHER, did, faults, notes, state, strike, word, xid

from health.checks.gpu import gpu_recovery
from health.history.cures import Driver, cured, noticed_resets
from health.history.state import DAY
from health.node.system import Event
from health.nvidia.xid_policy import RECOVERY

LOST = Event(NOW - 601, "lost", "now", {"gpu": GPU, "at": 0.0, "last": 0.0, "form": "bus"})
INIT = Event(NOW - 601, "lost", "now", {"gpu": GPU, "at": 0.0, "last": 0.0, "form": "init"})
SXID = "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): {}, {}"


def sxid(code: int, severity: str) -> Event:
    text = SXID.format(code, f"{severity}, Link 27 something")
    data = {"gpu": "0000:c1:00.0", "unit": "nvswitch3", "code": code, "text": text}
    return Event(NOW - 600, "sxid", "now", data)


NVLINK4 = "NVLink: fatal error detected on link 6({}, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"
NVLINK5_BAD = "SAW_MVB Fatal XC0 i0 Link -1 (0x00000021 0x00000002 0x0)"
NVLINK5_OK = "SAW_MVB Nonfatal XC0 i0 Link -1 (0x00000021 0x00000004 0x0)"

ONE_INCIDENT = [
    ([], []),
    ([xid(79)], [("xid-79", "reboot")]),
    ([xid(46)], [("xid-46", "reset-gpu")]),
    ([xid(54)], [("xid-54", "service")]),
    # the program's fault, wear, nothing at all
    ([xid(13), xid(31), xid(43), xid(94), xid(63), xid(92), xid(137)], []),
    ([xid(4242), xid(61), xid(163)], []),
    # 45 follows what is beside it, and closes nothing when it is alone
    ([xid(45)], []),
    ([xid(45), xid(79)], [("xid-79", "reboot")]),
    # 48 follows 63, 64, 94, 95
    ([xid(48)], [("xid-48", "reset-gpu")]),
    ([xid(48), xid(63)], [("xid-48", "reset-gpu")]),
    ([xid(48), xid(94), xid(45)], []),
    ([xid(48), xid(63), xid(94), xid(45)], [("xid-48", "reset-gpu")]),
    ([xid(48), xid(94, gpu=OTHER)], [("xid-48", "reset-gpu")]),
    ([xid(48), xid(172), xid(94)], []),
    ([xid(48), xid(171)], [("xid-48", "reset-gpu")]),
    ([xid(171)], [("xid-171", "reset-gpu")]),
    # a lost GPU with and without a number
    ([LOST], [("gpu-fell-off-bus", "reboot")]),
    ([LOST, xid(79)], [("xid-79", "reboot")]),
    ([INIT], [("gpu-init-failed", "reboot")]),
    # NVLink
    ([xid(74, text=NVLINK4.format("0x10000"))], [("xid-74", "reset-gpu")]),
    ([xid(74, text=NVLINK4.format("0x1"))], []),
    ([xid(74, text="in a form nobody knows")], [("xid-74", "reset-gpu")]),
    ([xid(144, text=NVLINK5_BAD)], [("xid-144", "reset-gpu")]),
    ([xid(144, text=NVLINK5_OK)], []),
    ([xid(149, text="in a form nobody knows")], [("xid-149", "reset-gpu")]),
    # 159 goes with a harder one
    ([xid(159)], [("xid-159", "reset-gpu")]),
    ([xid(159), xid(119)], [("xid-119", "reset-gpu")]),
    # switches
    ([sxid(20034, "Fatal")], [("sxid-fatal", "reset-gpu")]),
    ([sxid(23005, "Fatal")], [("sxid-always-fatal", "reboot")]),
    ([sxid(20034, "Non-fatal")], []),
    ([sxid(19084, "Non-fatal")], [("sxid-fatal", "reset-gpu")]),
    ([sxid(12028, "Non-fatal"), sxid(11012, "Correctable"), sxid(77777, "Non-fatal")], []),
    ([sxid(77777, "Fatal")], [("sxid-fatal", "reset-gpu")]),
    # the driver's own word stands above the catalogue
    ([xid(79), word(1)], [("xid-79", "reset-gpu")]),
    ([xid(79), word(2)], [("xid-79", "reboot")]),
    ([LOST, word(1)], [("gpu-fell-off-bus", "reset-gpu")]),
    ([xid(95), word(2)], [("xid-95", "reboot")]),
    ([xid(95), word(4), word(1, 598)], [("xid-95", "reset-gpu")]),
    ([xid(95), word(1), word(0, 598)], []),
    ([xid(13), word(1)], [("xid-154", "reset-gpu")]),
    ([word(2)], [("xid-154", "reboot")]),
    ([word(5)], [("xid-154", "restart-imex")]),
    ([word(3)], [("xid-154", "clear-leftovers")]),
    ([word(6)], [("xid-154", "reboot")]),
    ([word(9)], [("xid-154", "reboot")]),
    ([xid(154, text="in a form nobody knows")], [("xid-154", "reboot")]),
    ([xid(119), word(2)], [("xid-154", "reboot"), ("xid-119", "reset-gpu")]),
    ([xid(48), xid(94), word(1)], [("xid-154", "reset-gpu")]),
    ([xid(144, text=NVLINK5_OK), word(4)], [("xid-154", "reset-gpu")]),
    # beside is within three minutes of silence
    ([xid(45, 600), xid(31, 500)], []),
    ([xid(48, 600), xid(94, 300)], [("xid-48", "reset-gpu")]),
    ([xid(48, 600), xid(43, 450), xid(94, 300)], []),
]  # fmt: skip


@pytest.mark.parametrize(("events", "expected"), ONE_INCIDENT)
def test_one_incident(events: list[Event], expected: list[tuple[str, str]]) -> None:
    assert faults(*events) == expected
    assert faults(*reversed(events)) == expected


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([xid(45)], ["xid-45"]),
        ([xid(45), xid(45, gpu=OTHER)], ["xid-45", "xid-45"]),
        ([xid(45, text="Ch 8 caused by previous Xid 31")], []),
        ([xid(45), xid(13)], ["xid-app"]),
        ([xid(45, 900), xid(13, 500)], ["xid-app", "xid-45"]),
        ([xid(163)], ["xid-unlisted"]),
        ([xid(163, 600), xid(162, 500)], []),
        ([xid(162, 600), xid(163, 500)], ["xid-unlisted"]),
        ([xid(163, 600), xid(162, 500, OTHER)], ["xid-unlisted"]),
        ([xid(4242)], ["xid-unlisted"]),
        ([xid(94)], ["xid-94"]),
        ([xid(63)], ["xid-wear"]),
        ([sxid(12028, "Non-fatal")], ["sxid-nonfatal"]),
        ([sxid(11012, "Non-fatal")], []),
    ],
)
def test_what_is_only_told(events: list[Event], expected: list[str]) -> None:
    assert notes(*events) == expected
    assert not state(*events).faults


RESET, REBOOTED = did("reset", 300, gpu=GPU), "b0"


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # a reset cures what a reset cures, of its GPU
        ([xid(119), RESET], []),
        ([xid(119), did("reset", 300, gpu="")], []),
        ([xid(119), did("reset", 300, gpu=OTHER)], [("xid-119", "reset-gpu")]),
        ([xid(119), did("driver", 300)], []),
        ([xid(119), did("undrain", 300)], []),
        ([xid(119, 200), RESET], [("xid-119", "reset-gpu")]),
        ([xid(119, 300), RESET], [("xid-119", "reset-gpu")]),
        ([xid(119, 600, lasted=400.0), RESET], [("xid-119", "reset-gpu")]),
        ([xid(79), RESET], [("xid-79", "reboot")]),
        ([xid(79), did("driver", 300)], [("xid-79", "reboot")]),
        ([xid(54), did("driver", 300)], [("xid-54", "service")]),
        ([sxid(20034, "Fatal"), RESET], [("sxid-fatal", "reset-gpu")]),
        ([sxid(20034, "Fatal"), did("reset", 300, gpu="")], []),
        # a boot cures all but what needs hands
        ([xid(119, boot=REBOOTED), xid(79, boot=REBOOTED)], []),
        ([xid(54, boot=REBOOTED)], [("xid-54", "service")]),
        ([xid(54, boot=REBOOTED), did("repaired", 300)], []),
        ([xid(79), did("repaired", 300)], []),
        ([did("repaired", 300), xid(79, 200)], [("xid-79", "reboot")]),
        ([xid(79, 200), did("repaired", 3800)], []),  # the clock was set back an hour
        ([xid(79, -9 * DAY), did("repaired", 300)], []),  # … was days ahead
        ([xid(79, -9 * DAY, boot="old"), did("repaired", 300)], []),
        ([xid(79, 400, lasted=150), did("repaired", 300)], [("xid-79", "reboot")]),  # and again
        ([xid(79), did("repaired", -9 * DAY)], [("xid-79", "reboot")]),
        # the driver takes its word back
        ([xid(95, 900), word(3, 899), word(0, 100)], []),
        (
            [xid(95, 900), word(3, 899), word(0, 400), xid(95, 90), word(1, 89)],
            [("xid-95", "reset-gpu")],
        ),
        ([xid(95, 900), word(0, 899), word(1, 898)], [("xid-95", "reset-gpu")]),
        ([xid(95, 900), word(2, 899), word(0, 100)], [("xid-95", "reboot")]),
        ([xid(46, 900), word(0, 100)], [("xid-46", "reset-gpu")]),
        # the word of before a reset is no word for after it
        (
            [word(2, 900), did("driver", 800), xid(95, 790)],
            [("xid-154", "reboot"), ("xid-95", "reset-gpu")],
        ),
    ],
)
def test_cures(events: list[Event], expected: list[tuple[str, str]]) -> None:
    assert faults(*events) == expected


NONE = Driver({GPU: 0}, frozenset({GPU}), 580)


@pytest.mark.parametrize(
    ("events", "driver", "expected"),
    [
        # NVML's "none" is the driver's word on what it is known to speak of
        ([xid(95)], NONE, []),
        ([xid(95)], NONE._replace(branch=550), [("xid-95", "reset-gpu")]),
        ([xid(95)], Driver({OTHER: 0}, frozenset({OTHER}), 580), [("xid-95", "reset-gpu")]),
        ([xid(95)], Driver({}, frozenset({GPU}), 580), [("xid-95", "reset-gpu")]),
        ([xid(95)], NONE._replace(words={GPU: 1}), [("xid-95", "reset-gpu")]),
        ([xid(95, 5)], NONE, [("xid-95", "reset-gpu")]),  # may be newer than NVML's answer
        ([xid(119)], NONE, [("xid-119", "reset-gpu")]),  # no 154 follows a 119
        ([xid(79)], NONE, [("xid-79", "reboot")]),
        ([word(2)], NONE, [("xid-154", "reboot")]),
        # … and where it asked for a reset, that it was done
        ([xid(119), word(1)], NONE, []),
        ([xid(79), word(1)], NONE, []),
        ([word(1)], NONE, []),
        ([xid(46), word(3)], NONE, [("xid-46", "reset-gpu")]),
        ([INIT], NONE, []),
        ([INIT], Driver(), [("gpu-init-failed", "reboot")]),
    ],
)
def test_what_nvml_says_now(
    events: list[Event], driver: Driver, expected: list[tuple[str, str]]
) -> None:
    assert faults(*events, driver=driver) == expected


def test_a_noticed_reset_can_be_recorded_once() -> None:
    events = [xid(119), word(1)]
    (reset,) = noticed_resets(events, NOW, "now", NONE)
    assert (reset.kind, reset.data["gpu"]) == ("reset", GPU)
    assert noticed_resets([*events, reset], NOW + 60, "now", NONE) == []
    assert faults(*events, reset) == []  # also when NVML cannot be asked any more
    assert noticed_resets([*events, word(3, 500)], NOW, "now", NONE) == []
    assert noticed_resets(events, NOW, "another boot", NONE) == []


@pytest.mark.parametrize(
    ("overrides", "events", "expected"),
    [
        ({79: "service"}, [xid(79)], [("xid-79", "service")]),
        ({79: "none"}, [xid(79)], []),
        ({79: "none"}, [LOST], []),
        ({79: "reset-gpu"}, [LOST], [("gpu-fell-off-bus", "reset-gpu")]),
        ({13: "reset-gpu"}, [xid(13)], [("xid-13", "reset-gpu")]),
        ({45: "restart-fabric-manager"}, [xid(45)], [("xid-45", "restart-fabric-manager")]),
        ({4242: "reboot"}, [xid(4242)], [("xid-4242", "reboot")]),
        ({94: "reset-gpu"}, [xid(94)], [("xid-94", "reset-gpu")]),
        ({95: "service"}, [xid(95), word(1)], [("xid-95", "service")]),
        ({154: "none"}, [word(2)], []),
    ],
)
def test_the_site_decides(
    overrides: dict[int, Any], events: list[Event], expected: list[tuple[str, str]]
) -> None:
    assert faults(*events, overrides=overrides) == expected


def test_contained_errors_add_up_until_a_reset() -> None:
    three = [xid(94, ago) for ago in (3000, 2000, 1000)]
    assert faults(*three) == [("xid-94", "reset-gpu")]
    assert faults(*three, contained=4) == []
    assert faults(xid(94, 1000, gpu=OTHER), *three[:2]) == []
    assert faults(*three[:2], did("driver", 1500), three[2]) == []
    assert faults(*three, did("driver", 500)) == []
    storm = [xid(94, 1000 + n) for n in range(50)]
    assert faults(*storm) == [("xid-94", "reset-gpu")]  # fifty events are fifty incidents …
    assert faults(xid(94, 1000, count=50, lasted=50.0)) == []  # … a storm is read as one


def test_wear_is_counted_over_boots() -> None:
    old = [xid(63, 29 * DAY, boot="a"), xid(63, 5 * DAY, boot="b", count=3), xid(92, 60)]
    assert state(*old).wear == {GPU: {63: 3, 92: 1}}


@pytest.mark.parametrize(
    ("strikes", "lemon"),
    [
        ([strike(1, 10), strike(2, 20), strike(3, 10)], True),
        ([strike(1, 10), strike(2, 10), strike(3, 10)], False),
        ([strike(1, 10), strike(2, 20)], False),
        ([strike(1, 10), strike(1, 20), strike(1, 10)], False),
        ([strike(1, 10, 40 * DAY), strike(2, 20), strike(3, 10)], False),
        ([strike(1, 10, -40 * DAY), strike(2, 20), strike(3, 10)], False),  # a clock gone wrong
        ([strike(1, 10), strike(2, 20), strike(3, 10), did("repaired", 60)], False),
        # Two users of one account of Slurm's are one voice; what is not known speaks for its user.
        ([strike(1, 10, account="a"), strike(2, 20, account="a"), strike(3, 10)], True),
        ([strike(n, 10 * n, account="a") for n in (1, 2, 3)], False),
        ([strike(1, 10, account="a"), *(strike(n, 20, account="b") for n in (2, 3))], True),
        ([strike(1, 10, account="a"), *(strike(n, 10, account="b") for n in (2, 3))], False),
    ],
)
def test_lemons(strikes: list[Event], lemon: bool) -> None:
    found = state(*strikes)
    assert bool(found.lemon) is lemon
    assert found.action == ("service" if lemon else "none")


DRAINED = did("drain", 1000, "now", action="reset-gpu")


@pytest.mark.parametrize(
    ("action", "events", "boot", "booted", "missing"),
    [
        ("none", [], "now", 0, ""),
        ("clear-leftovers", [], "now", 0, ""),
        ("restart-fabric-manager", [], "now", 0, ""),
        ("reboot", [did("reset", 500, gpu="")], "now", 0, "has not rebooted"),
        ("reset-gpu", [], "now", 0, "no reset of 0000:3b:00.0"),
        ("reset-gpu", [did("reset", 500, gpu=GPU)], "now", 0, ""),
        ("reset-gpu", [did("reset", 500, gpu="")], "now", 0, ""),
        ("reset-gpu", [did("reset", 500, gpu=OTHER)], "now", 0, "no reset"),
        ("reset-gpu", [did("reset", 2000, gpu=GPU)], "now", 0, "no reset"),
        ("reset-gpu", [did("driver", 500)], "now", 0, ""),
        ("reset-gpu", [], "later", 0, ""),
        ("reset-gpu", [], "now", NOW - 900, "no reset"),  # the clock jumped: it is the same boot
        ("reboot", [did("driver", 500)], "now", 0, "has not rebooted"),
        ("reboot", [], "later", 0, ""),
        ("reboot", [], "now", NOW - 900, "has not rebooted"),
        ("service", [did("driver", 500)], "later", 0, "robust-health repaired"),
        ("service", [did("repaired", 500)], "now", 0, ""),
        ("service", [did("repaired", 2000)], "now", 0, "robust-health repaired"),
        ("reboot", [did("repaired", 500)], "now", 0, ""),
    ],
)
def test_proofs(action: Any, events: list[Event], boot: str, booted: float, missing: str) -> None:
    why = cured(action, GPU, DRAINED, events, boot, booted)
    assert missing in why if missing else why == ""


def test_a_drain_of_which_only_slurm_knows_is_judged_by_the_clock() -> None:
    unknown = DRAINED._replace(boot="")
    assert cured("reboot", GPU, unknown, [], "now", NOW - 900) == ""
    assert "has not rebooted" in cured("reboot", GPU, unknown, [], "now", NOW - 1100)


def test_every_recovery_action_is_known() -> None:
    """The same word means the same action by Xid 154 and by NVML."""
    assert {word: RECOVERY[word] for word in gpu_recovery.ACTIONS} == {
        word: condition.action for word, (condition, _) in gpu_recovery.ACTIONS.items()
    }
    assert set(RECOVERY) == {-1, 0, *gpu_recovery.ACTIONS}


# code; a message after which NVIDIA's table wants a reset, one after which it wants none
SUBCODES = [
    (144, "SAW_MVB Fatal XC0 i0 Link -1 (0x21 0x10)", "SAW_MVB Nonfatal XC0 i0 Link -1 (0x21 0x1)"),
    (145, "RLW_REMAP Fatal XC0 i0 Link 5 (0x4 0x40)", "RLW_REMAP Nonfatal XC0 i0 Link 5 (0x4 0x1)"),
    (146, "TLW_RX Fatal XC0 i0 Link 5 (0x143 0x4)", "TLW_RX Nonfatal XC0 i0 Link 5 (0x143 0x1)"),
    (147, "TREX Fatal XC0 i0 Link 5 (0x8 0x40)", "TREX Nonfatal XC0 i0 Link 5 (0x8 0x1)"),
    (148, "NVLPW Fatal XC0 i0 Link 5 (0x9 0x1)", "NVLPW Nonfatal XC0 i0 Link 5 (0x9 0x80000000)"),
    (
        149,
        "NETIR_LINK_EVT Fatal XC0 i0 Link 8 (0x004505c6 0x0)",
        "NETIR_BER_EVENT Nonfatal XC0 i0 Link 3 (0x226 0x1)",
    ),
    (
        150,
        "MSE_WATCHDOG Fatal XC0 i0 Link -1 (0x0 0x0)",
        "NEW_UNIT Nonfatal XC0 i0 Link 3 (0x0 0x0)",
    ),
]


@pytest.mark.parametrize(("code", "fatal", "harmless"), SUBCODES)
def test_nvlink5_tells_fatal_from_not(code: int, fatal: str, harmless: str) -> None:
    for text in (fatal, "in a form nobody knows"):
        assert faults(xid(code, text=text)) == [(f"xid-{code}", "reset-gpu")]
    for text in (harmless, "some new unit: Nonfatal"):
        assert faults(xid(code, text=text)) == []
        assert notes(xid(code, text=text)) == ["xid-wear"]
    assert faults(xid(code, text=harmless), xid(code, text=fatal)) == [(f"xid-{code}", "reset-gpu")]
    assert faults(xid(code, text=harmless), word(2)) == [("xid-154", "reboot")]
