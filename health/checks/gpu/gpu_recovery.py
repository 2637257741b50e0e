"""The driver's own word on what a GPU needs (NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)."""

from __future__ import annotations

from health.check import Check, Condition
from health.finding import Finding
from health.node.system import System
from health.nvidia import gpus

RESET = Condition("recovery-reset", "FAIL", "node", "reset-gpu", "the action is 1: reset")
REBOOT = Condition("recovery-reboot", "FAIL", "node", "reboot", "the action is 2 or 7: reboot")
DRAIN_P2P = Condition(
    "recovery-drain-p2p", "FAIL", "node", "clear-leftovers", "the action is 3: drain P2P"
)
DRAIN_RESET = Condition(
    "recovery-drain-reset", "FAIL", "node", "reset-gpu", "the action is 4: drain and reset"
)
IMEX = Condition(
    "recovery-imex",
    "FAIL",
    "node",
    "restart-imex",
    "the action is 5: recover the IMEX domain",
)
BUS_RESET = Condition("recovery-bus-reset", "FAIL", "node", "reboot", "the action is 6: bus reset")
UNKNOWN = Condition("recovery-unknown", "FAIL", "node", "reboot", "the action is another number")
UNREADABLE = Condition(
    "recovery-unreadable", "ERROR", "node", "reboot", "NVML did not report the action"
)

# nvmlDeviceGpuRecoveryAction_t of nvml.h 13, and what NVIDIA asks for
# (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html; 5 to 7:
# nvidia.github.io/cuda-python, cuda.bindings.nvml.DeviceGpuRecoveryAction). The same actions as in
# xid_policy.RECOVERY, for Xid 154.
ACTIONS = {
    1: (RESET, "end its processes and reset it"),
    2: (REBOOT, "the operating system may be inconsistent"),
    3: (
        DRAIN_P2P,
        "end every process that communicates with other GPUs; then the driver reports the next "
        "action",
    ),
    4: (DRAIN_RESET, "it runs with reduced resources: start no new work until it is reset"),
    5: (IMEX, "restart nvidia-imex on the nodes of its IMEX domain"),
    6: (BUS_RESET, "its PCIe bus must be reset"),
    7: (REBOOT, "the whole system must reboot"),
}


def run(system: System) -> list[Finding]:
    """One finding per GPU for which the driver wants something."""
    found = []
    for device in gpus.devices(system):
        name, board = gpus.name(device), gpus.identity(device)
        found += gpus.unreadable(UNREADABLE, device, "recovery_action", board=board)
        number = device.get("recovery_action", 0)
        if number:
            condition, text = ACTIONS.get(number, (UNKNOWN, "an unknown action"))
            found.append(
                condition.found(f"NVML recovery action {number}, expected 0: {text}{board}", name)
            )
    return found


CHECK = Check(
    "gpu_recovery",
    run,
    (RESET, REBOOT, DRAIN_P2P, DRAIN_RESET, IMEX, BUS_RESET, UNKNOWN, UNREADABLE),
    {},
    needs_nvml=True,
    cost_ms=0.1,
)
