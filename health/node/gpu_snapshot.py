"""The form of one NVML collection's result (nvml.py fills it, the GPU checks read it).

Plain JSON, so that it can be recorded and replayed. A query that NVML refused is missing from the
device and named in its ``errors`` ({"ecc": "NVML_ERROR_NOT_SUPPORTED"}); keys inside a group are
missing alike.
"""

from __future__ import annotations

from typing import TypedDict


class GpuMemory(TypedDict, total=False):
    total: int  # bytes
    used: int  # bytes, without what the driver reserves


class GpuProcess(TypedDict, total=False):
    pid: int
    memory: int  # bytes; missing: not told
    kind: str  # "compute" or "graphics"


class Ecc(TypedDict, total=False):
    enabled: bool
    pending: bool  # the mode after the next boot or reset
    volatile_corrected: int  # since the driver was loaded or the GPU reset
    volatile_uncorrected: int
    aggregate_corrected: int  # over the life of the board
    aggregate_uncorrected: int
    sram_threshold_exceeded: bool  # Hopper and later: the board wants to be replaced


class Remap(TypedDict, total=False):
    corrected: int  # rows
    uncorrected: int
    pending: bool
    failed: bool
    spare_none: int  # memory banks with no spare rows left (row remapper histogram)


class Retired(TypedDict, total=False):
    single: int  # pages (before Ampere)
    double: int
    pending: bool


class Clocks(TypedDict, total=False):
    sm: int  # MHz
    memory: int
    max_sm: int
    max_memory: int
    app_sm: int
    app_memory: int
    default_app_sm: int
    default_app_memory: int


class Temperature(TypedDict, total=False):
    gpu: int  # degrees Celsius
    memory: int
    slowdown: int  # threshold
    shutdown: int
    memory_max: int


class Power(TypedDict, total=False):
    draw: float  # W
    limit: float
    default_limit: float
    enforced_limit: float


class Pcie(TypedDict, total=False):
    generation: int
    max_generation: int  # of GPU and slot together
    width: int
    max_width: int
    replays: int


class NvLink(TypedDict, total=False):
    link: int
    active: bool
    version: int
    remote: str  # PCI address at the other end
    errors: dict[str, int]  # "crc_flit", "crc_data", "replay", "recovery"; NVLink5: "fatal", "bad"


class Fabric(TypedDict, total=False):
    state: str  # "not_supported", "not_started", "in_progress", "completed"
    status: str  # NVML's name of the result: "NVML_SUCCESS"
    health: int  # mask; missing: not told


class Device(TypedDict, total=False):
    index: int
    pci: str  # "0000:3b:00.0", lower case, four-digit domain
    uuid: str
    serial: str
    name: str
    vbios: str
    persistence: bool
    compute_mode: str  # "default", "exclusive_process", "prohibited"
    mig: bool
    mig_pending: bool
    memory: GpuMemory
    processes: list[GpuProcess]
    ecc: Ecc
    remap: Remap
    retired: Retired
    recovery_action: int  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: 0 none … 4 drain and reset
    throttle: int  # mask of the reasons now (nvmlClocksEventReason*)
    clocks: Clocks
    temperature: Temperature
    power: Power
    pcie: Pcie
    nvlinks: list[NvLink]
    fabric: Fabric
    errors: dict[str, str]  # query -> name of NVML's error


class Lost(TypedDict, total=False):
    """A GPU that NVML counts but gives no handle for, or whose handle says it is gone."""

    index: int
    pci: str
    error: str


class GpuSnapshot(TypedDict, total=False):
    """``stage`` is "done", or what was being asked when it hung or failed ("init", "gpu3 ecc")."""

    stage: str
    hung: bool  # no answer within the deadline
    killed: bool  # of what hung: its process ended when killed; False: the driver holds it
    waited: float  # seconds until what hung was given up
    error: str  # name of the NVML error that ended it, "no-library", "no-pynvml"; empty: none
    driver: str
    nvml: str
    cuda: str
    count: int
    devices: list[Device]
    lost: list[Lost]
