"""The speeds of a healthy GPU of each model, and the floors below which a GPU is unhealthy. Pure.

Peaks are NVIDIA's, dense (a data sheet's tensor-core number "with sparsity" halved): A100, H100,
H200 and L40S Tensor Core GPU data sheets; Blackwell (HGX B200, GB200 NVL72) data sheet. A model
is known by the exact name that NVML and torch give: a part of a GPU ("... MIG 1g.10gb"), a GPU
with another memory or a limited export model is none of these and has no floor, nor has "cpu".
There, and above the floor, only the fleet's own record and the run itself are compared.

All-reduce between nodes depends on the fabric, not on the GPU: no floor of it is known here, nor
of our own all-reduce inside a node, whose messages are shorter than those that are published. What
a link reaches depends on the host and the board too, which a GPU's name does not tell: the
published floor of a link only warns, a site's own names a node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

# Shares of the peak: the floors. A floor finds a broken device, not a slow kernel: it lies below
# what healthy ones reach at any room temperature and library version, and above half speed, which
# is what the usual faults leave (clocks locked low, half of a link).
#
# Products: cuBLAS reaches 0.65-0.8 of the dense peak on an SXM board, less as power draws near
# the board's limit. A PCIe board draws its limit at a far lower clock: 0.5-0.65.
SHARE_COMPUTE = 0.55
SHARE_COMPUTE_PCIE = 0.45
# A device-to-device copy, bytes read and bytes written both counted: healthy 0.8-0.93.
SHARE_MEMORY = 0.70
# Of what copies from pinned memory reach (not of the bus's raw rate). A link with half its lanes,
# or one generation down, gives 0.5; memory of the far socket costs up to a quarter.
SHARE_HOST = 0.65
# Of one direction of NVLink; healthy copies reach 0.8 or more, half of the links 0.5.
SHARE_NVLINK = 0.60
# Of the bus bandwidth sites accept for 8 GPUs by nccl-tests. Theirs are messages of gigabytes, and
# on Hopper the switch adds (NVLS: without it 360 of 480 remain).
SHARE_BUS = 0.60

# Copies from and to pinned memory in 1e9 bytes/s, x16: measured 24-26 and 54-56 where the bus
# could carry 31.5 and 63.
_GEN4, _GEN5 = 25.0, 54.0


class Profile(NamedTuple):
    """Peaks of one model: TFLOPS, 1e9 bytes/s. 0 where it has none, or none that always holds."""

    fp64: float  # tensor cores where they do it, which is what a library uses
    fp32: float
    tf32: float
    half: float  # bf16 and fp16
    fp8: float
    memory: float
    host: float  # each direction
    nvlink: float = 0.0  # all links to one peer, one direction; 0: bridges are a site's choice
    bus: float = 0.0  # accepted all-reduce bus bandwidth of 8 GPUs (nccl-tests' definition)
    board: str = "sxm"


# Accepted bus bandwidth: Azure's NDv4/NDv5 health checks (A100 228, H100 460, H200 480), AWS
# p6-b200 (600). A rack of GB200 is one NVLink domain; of one node's 4 GPUs nobody publishes it.
_A100_40_PCIE = Profile(19.5, 19.5, 156, 312, 0, 1555, _GEN4, board="pcie")
_A100_80_PCIE = _A100_40_PCIE._replace(memory=1935)
_A100_40_SXM = Profile(19.5, 19.5, 156, 312, 0, 1555, _GEN4, 300, 228)
_A100_80_SXM = _A100_40_SXM._replace(memory=2039)
_H100_SXM = Profile(67, 67, 494.5, 989.5, 1979, 3350, _GEN5, 450, 460)
_H100_PCIE = Profile(51, 51, 378, 756.5, 1513, 2000, _GEN5, board="pcie")
_H100_NVL = Profile(60, 60, 417.5, 835.5, 1670.5, 3900, _GEN5, board="pcie")
_H200_SXM = _H100_SXM._replace(memory=4800, bus=480)
_H200_NVL = _H100_NVL._replace(memory=4800)
_B200 = Profile(37, 75, 1100, 2250, 4500, 7700, _GEN5, 900, 600)
# The host of a GB200 is reached over NVLink-C2C, which two GPUs share: no rate that always holds.
_GB200 = Profile(40, 80, 1250, 2500, 5000, 8000, 0, 900)
_L40S = Profile(1.4, 91.6, 183, 362, 733, 864, _GEN4, board="pcie")

PROFILES: Mapping[str, Profile] = {
    "NVIDIA A100-PCIE-40GB": _A100_40_PCIE,
    "NVIDIA A100 80GB PCIe": _A100_80_PCIE,
    "NVIDIA A100-SXM4-40GB": _A100_40_SXM,
    "NVIDIA A100-SXM4-80GB": _A100_80_SXM,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": _H100_NVL,
    "NVIDIA H200": _H200_SXM,
    "NVIDIA H200 NVL": _H200_NVL,
    "NVIDIA B200": _B200,
    "NVIDIA GB200": _GB200,
    "NVIDIA L40S": _L40S,
}

# The names under which tests give what has a peak, in the order of peaks().
PUBLISHED = (
    "fp64_tflops", "fp32_tflops", "tf32_tflops", "bf16_tflops", "fp16_tflops", "fp8_tflops",
    "memory_gbps", "h2d_gbps", "d2h_gbps", "p2p_gbps", "nccl_tests_busbw_gbps",
)  # fmt: skip
# Values for which a site may set a floor: also our own all-reduce between a node's devices.
VALUES = (*PUBLISHED, "busbw_gbps")
# Of the published ones those that host and board decide as well: bus generation and lanes behind a
# switch, the memory of the far socket, which GPUs have bridges.
OF_LINKS = frozenset({"h2d_gbps", "d2h_gbps", "p2p_gbps", "nccl_tests_busbw_gbps"})


class Floor(NamedTuple):
    """The lowest value of a healthy device, and the source of that number.

    ``proof``: a device below it is bad; otherwise that is only worth a warning.
    """

    limit: float
    source: str
    proof: bool = True


Floors = Callable[[str, str], Floor | None]  # by model and value's name


def peaks(model: str) -> dict[str, float]:
    """The highest values that the model can reach, by name; empty for an unknown model."""
    one = PROFILES.get(model)
    if one is None:
        return {}
    numbers = (one.fp64, one.fp32, one.tf32, one.half, one.half, one.fp8)
    rates = (one.memory, one.host, one.host, one.nvlink, one.bus)
    return {k: v for k, v in zip(PUBLISHED, numbers + rates, strict=True) if v}


def floor(model: str, value: str) -> Floor | None:
    """The floor of a value on this model by the published numbers; None: there is none."""
    peak = peaks(model).get(value)
    if peak is None:
        return None
    share = _share(value, PROFILES[model].board)
    source = f"{share:g} of {_of(value)} {peak:g} of {model}"
    return Floor(share * peak, source, proof=value not in OF_LINKS)


def _share(value: str, board: str) -> float:
    if value.endswith("_tflops"):
        return SHARE_COMPUTE_PCIE if board == "pcie" else SHARE_COMPUTE
    return {
        "memory_gbps": SHARE_MEMORY,
        "p2p_gbps": SHARE_NVLINK,
        "nccl_tests_busbw_gbps": SHARE_BUS,
    }.get(value, SHARE_HOST)


def _of(value: str) -> str:
    if value in ("h2d_gbps", "d2h_gbps"):
        return "the usual"
    return "the accepted" if value == "nccl_tests_busbw_gbps" else "the published"


def with_site(overrides: Mapping[str, Mapping[str, float]]) -> Floors:
    """The floors with what the site set: ``[active.floors."NVIDIA H200"] bf16_tflops = 600``.

    A floor of 0 means that there is none. ValueError names a value that has no floor;
    settings_merge.py leaves only numbers of 0 and more.
    """
    own: dict[tuple[str, str], float] = {}
    for model, values in overrides.items():
        for value, limit in values.items():
            if value not in VALUES:
                known = ", ".join(VALUES)
                raise ValueError(f'[active.floors."{model}"] {value}: unknown; use one of {known}')
            own[model, value] = limit

    def chosen(model: str, value: str) -> Floor | None:
        limit = own.get((model, value))
        if limit is None:
            return floor(model, value)
        return Floor(limit, f'robust.toml, [active.floors."{model}"]') if limit else None

    return chosen
