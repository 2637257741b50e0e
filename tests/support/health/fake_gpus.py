"""Healthy GPUs by model, as one NVML collection tells of them, and the node around them.

    devices = [h100(i) for i in range(8)]
    devices[3]["ecc"]["volatile_uncorrected"] = 2
    system = gpu_node(devices)

What a model does not support is missing and named in ``errors``, as on the real boards.
"""

from __future__ import annotations

from typing import Any

from fake_system import FakeSystem

PCI = "/sys/bus/pci/devices"
NOT_SUPPORTED = "NVML_ERROR_NOT_SUPPORTED"
DRIVER = "570.133.20"
# As the eight GPUs of an HGX board lie.
ADDRESSES = tuple(f"0000:{bus}:00.0" for bus in ("1b", "43", "52", "61", "9d", "c3", "d1", "df"))
GIB = 1 << 30


def h100(index: int) -> Any:
    """NVIDIA H100 SXM: NVLink 4 with a fabric, recovery action, row remapping."""
    return _device(index, "NVIDIA H100 80GB HBM3", 80 * GIB, 18, 4, 700.0, (1980, 2619), pcie=5) | {
        "vbios": "96.00.99.00.01",
        "recovery_action": 0,
        "mig": False,
        "mig_pending": False,
        "ecc": _ecc() | {"sram_threshold_exceeded": False},
        "remap": {
            "corrected": 0,
            "uncorrected": 0,
            "pending": False,
            "failed": False,
            "spare_none": 0,
        },
        # degraded bandwidth, route recovery, route unhealthy, access time-out: all "false" (2)
        "fabric": {"state": "completed", "status": "NVML_SUCCESS", "health": 0b10101010},
        "errors": dict.fromkeys(("retired",), NOT_SUPPORTED),
    }


def gb200(index: int) -> Any:
    """NVIDIA GB200: NVLink 5, memory that is a NUMA node of the kernel."""
    device = h100(index) | {
        "name": "NVIDIA GB200",
        "vbios": "97.00.82.00.1a",
        "memory": {"total": 185 * GIB, "used": 0},
        "pci": f"{8 + index:04x}:01:00.0",
        "nvlinks": [
            {
                "link": n,
                "active": True,
                "version": 5,
                "errors": {"recovery": 0, "fatal": 0, "bad": 0},
            }
            for n in range(18)
        ],
    }
    device["clocks"] |= {"max_sm": 2062, "max_memory": 3996}
    device["errors"] |= dict.fromkeys(
        (
            "clocks.app_sm",
            "clocks.app_memory",
            "clocks.default_app_sm",
            "clocks.default_app_memory",
            "temperature.memory",
        ),
        NOT_SUPPORTED,
    )
    for key in ("app_sm", "app_memory", "default_app_sm", "default_app_memory"):
        del device["clocks"][key]
    del device["temperature"]["memory"]
    return device


def a100(index: int) -> Any:
    """NVIDIA A100 SXM under an older driver: no recovery action, no fabric state."""
    device = h100(index) | {
        "name": "NVIDIA A100-SXM4-80GB",
        "vbios": "92.00.45.00.05",
        "nvlinks": _links(12, 3),
        "ecc": _ecc(),
        "errors": dict.fromkeys(
            ("recovery_action", "retired", "fabric", "ecc.sram_threshold_exceeded"), NOT_SUPPORTED
        ),
    }
    del device["recovery_action"], device["fabric"]
    device["pcie"] |= {"generation": 4, "max_generation": 4}
    device["clocks"] |= {"max_sm": 1410, "max_memory": 1593}
    return device


def v100(index: int) -> Any:
    """Tesla V100 SXM2: retired pages, no row remapping, no MIG, no memory temperature limits."""
    device = a100(index) | {
        "name": "Tesla V100-SXM2-32GB",
        "vbios": "88.00.48.00.02",
        "memory": {"total": 32 * GIB, "used": 0},
        "nvlinks": _links(6, 2),
        "retired": {"single": 0, "double": 0, "pending": False},
    }
    device["errors"] = dict.fromkeys(
        ("recovery_action", "remap", "fabric", "mig", "ecc.sram_threshold_exceeded"), NOT_SUPPORTED
    )
    del device["remap"], device["mig"], device["mig_pending"]
    device["pcie"] |= {"generation": 1, "max_generation": 3}  # idle: saves power
    device["clocks"] |= {"max_sm": 1530, "max_memory": 877}
    return device


def rtx4090(index: int) -> Any:
    """A GeForce: no ECC, no NVLink, no remapping, no memory temperature; idle at generation 1."""
    device = h100(index) | {
        "name": "NVIDIA GeForce RTX 4090",
        "serial": "",
        "vbios": "95.02.18.80.87",
        "memory": {"total": 24 * GIB, "used": 0},
        "temperature": {"gpu": 34, "slowdown": 91, "shutdown": 96},
        "errors": dict.fromkeys(
            (
                "serial",
                "ecc",
                "remap",
                "retired",
                "nvlinks",
                "fabric",
                "mig",
                "temperature.memory",
                "temperature.memory_max",
            ),
            NOT_SUPPORTED,
        ),
    }
    for key in ("ecc", "remap", "nvlinks", "fabric", "mig", "mig_pending"):
        del device[key]
    device["pcie"] |= {"generation": 1, "max_generation": 4}
    device["throttle"] = 1
    return device


MODELS = {"v100": v100, "a100": a100, "h100": h100, "gb200": gb200, "rtx4090": rtx4090}


def snapshot(devices: list[Any], **over: Any) -> Any:
    """A collection that came to its end."""
    whole = {
        "stage": "done",
        "hung": False,
        "error": "",
        "driver": DRIVER,
        "nvml": f"12.{DRIVER}",
        "cuda": "12.8",
        "count": len(devices),
        "devices": devices,
        "lost": [],
    }
    return whole | over


def gpu_node(devices: list[Any], gres: str | None = None, **over: Any) -> FakeSystem:
    """A node n1 with these GPUs on its PCI bus, in slurm.conf, gres.conf and the driver's files."""
    found = over.pop("snapshot", None) or snapshot(devices)
    count = len(devices)
    gres = f"gpu:{count}" if gres is None else gres
    files = {
        "/etc/slurm/slurm.conf": f"NodeName=n[1-4] Gres={gres}\n" if gres else "NodeName=n[1-4]\n",
        "/etc/slurm/gres.conf": f"NodeName=n[1-4] Name=gpu File=/dev/nvidia[0-{count - 1}]\n",
        "/sys/module/nvidia/version": f"{DRIVER}\n",
    }
    links = {}
    for device in devices:
        address, minor = device["pci"], device["index"]
        files |= pci_files(address)
        files[f"/dev/nvidia{minor}"] = ""
        files[f"/proc/driver/nvidia/gpus/{address}/information"] = (
            f"Model: \t\t {device['name']}\nDevice Minor: \t {minor}\nGPU Excluded:\t No\n"
        )
        links[f"{PCI}/{address}/driver"] = "../../../../bus/pci/drivers/nvidia"
    files |= over.pop("files", {})
    links |= over.pop("links", {})
    return FakeSystem(
        files,
        links=links,
        dirs=["/var/spool/slurmd", *over.pop("dirs", [])],
        snapshot=found,
        **over,
    )


def pci_files(address: str, pci_class: str = "0x030200", vendor: str = "0x10de") -> dict[str, str]:
    """A PCI device in sysfs: a GPU unless said otherwise."""
    return {
        f"{PCI}/{address}/vendor": f"{vendor}\n",
        f"{PCI}/{address}/class": f"{pci_class}\n",
        f"{PCI}/{address}/current_link_width": "16\n",
        f"{PCI}/{address}/max_link_width": "16\n",
    }


def _device(
    index: int,
    name: str,
    memory: int,
    links: int,
    nvlink: int,
    watts: float,
    clocks: tuple[int, int],
    pcie: int,
) -> Any:
    sm, mem = clocks
    return {
        "index": index,
        "pci": ADDRESSES[index],
        "uuid": f"GPU-00000000-0000-0000-0000-{index:012d}",
        "serial": f"165{index:010d}",
        "name": name,
        "persistence": True,
        "compute_mode": "default",
        "memory": {"total": memory, "used": 0},
        "processes": [],
        "throttle": 1,
        "clocks": {
            "sm": 345,
            "memory": mem,
            "max_sm": sm,
            "max_memory": mem,
            "app_sm": sm,
            "app_memory": mem,
            "default_app_sm": sm,
            "default_app_memory": mem,
        },
        "temperature": {"gpu": 31, "memory": 40, "slowdown": 87, "shutdown": 92, "memory_max": 95},
        "power": {
            "draw": 71.3,
            "limit": watts,
            "default_limit": watts,
            "enforced_limit": watts,
        },
        "pcie": {
            "generation": pcie,
            "max_generation": pcie,
            "width": 16,
            "max_width": 16,
            "replays": 0,
        },
        "nvlinks": _links(links, nvlink),
        "errors": {},
    }


def _links(count: int, version: int) -> list[dict[str, Any]]:
    return [
        {
            "link": n,
            "active": True,
            "version": version,
            "errors": {"crc_flit": 0, "crc_data": 0, "replay": 0, "recovery": 0},
        }
        for n in range(count)
    ]


def _ecc() -> dict[str, Any]:
    return {
        "enabled": True,
        "pending": True,
        "volatile_corrected": 0,
        "volatile_uncorrected": 0,
        "aggregate_corrected": 0,
        "aggregate_uncorrected": 0,
    }
