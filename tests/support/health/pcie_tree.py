"""A node's PCIe devices in sysfs, with their error counters."""

from __future__ import annotations

from typing import Any

GPU, NIC, DISK, BOARD = "0000:1b:00.0", "0000:3b:00.0", "0000:5e:00.0", "0000:04:00.0"
SWITCH, ROOT = "0000:19:00.0", "0000:17:01.0"


def tree(**counts: str) -> dict[str, Any]:
    """sysfs of a GPU below a switch, an adapter and an NVMe; counts like gpu_fatal="DLP 1"."""
    base = "/sys/bus/pci/devices"
    files = {f"{base}/{BOARD}/class": "0x020000\n"}
    for name, address in {"gpu": GPU, "nic": NIC, "disk": DISK, "switch": SWITCH}.items():
        for kind, total in (("fatal", "FATAL"), ("nonfatal", "NONFATAL"), ("correctable", "COR")):
            said = counts.get(f"{name}_{kind}", "")
            rows = [row.split() for row in said.split(",") if row]
            errors = sum(int(number) for _, number in rows)
            lines = [f"{what} {number}" for what, number in rows]
            text = "\n".join(["Undefined 0", *lines, f"TOTAL_ERR_{total} {errors}", ""])
            files[f"/sys/devices/pci0000:17/{address}/aer_dev_{kind}"] = text
    path = f"../../../devices/pci0000:17/{ROOT}/{SWITCH}/{GPU}"
    links = {
        "/sys/class/infiniband/mlx5_0/device": f"../../../{NIC}",
        "/sys/class/net/ib0/device": f"../../../{NIC}",
        "/sys/class/nvme/nvme0/device": f"../../../{DISK}",
        f"{base}/{GPU}": path,
        f"{base}/{NIC}": f"../../../devices/pci0000:3a/0000:3a:01.0/{NIC}",
        f"{base}/{DISK}": f"../../../devices/pci0000:5d/{DISK}",
    }
    for address in (GPU, NIC, DISK, SWITCH):
        for kind in ("fatal", "nonfatal", "correctable"):
            source = files.pop(f"/sys/devices/pci0000:17/{address}/aer_dev_{kind}")
            place = links.get(f"{base}/{address}", "").replace("../../..", "/sys")
            files[f"{place or f'{base}/{address}'}/aer_dev_{kind}"] = source
    files["/sys/class/net/lo/mtu"] = "65536\n"
    files[f"/proc/driver/nvidia/gpus/{GPU}/information"] = "Model: NVIDIA H100\n"
    return {"files": files, "links": links}
