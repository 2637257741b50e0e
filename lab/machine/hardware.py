"""The hardware that a node of a lab claims to have, as text (pure): its nvml.state, /sys, /proc.

An HGX H100 board, as far as monitoring sees it. What is wrong with it is in `Hardware.nvml` (keys
of the fake NVML, docs/lab.md) and in its ports; the trees follow from that.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

DRIVER = "570.133.20"
GPU_NAME = "NVIDIA H100 80GB HBM3"
VBIOS = "96.00.99.00.01"
_GPU_BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)  # those of a DGX H100
_HCA_BUSES = (0x18, 0x40, 0x4F, 0x5E)
_SWITCH_BUSES = (0x05, 0x06, 0x07, 0x08)  # NVSwitches: NVIDIA's too, but no GPUs
HCAS = tuple(f"mlx5_{i}" for i in range(len(_HCA_BUSES)))

_SPEEDS = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0"}  # GT/s of a PCIe generation

_AER = {
    "correctable": ("RxErr BadTLP BadDLLP Rollover Timeout NonFatalErr CorrIntErr HeaderOF", "COR"),
    "fatal": ("Undefined DLP SDES TLP FCP CmpltTO CmpltAbrt UnxCmplt RxOF MalfTLP ECRC", "FATAL"),
    "nonfatal": ("Undefined DLP SDES TLP FCP CmpltTO CmpltAbrt UnxCmplt RxOF MalfTLP", "NONFATAL"),
}

_COUNTERS = (
    "VL15_dropped excessive_buffer_overrun_errors link_downed link_error_recovery "
    "local_link_integrity_errors multicast_rcv_packets multicast_xmit_packets "
    "port_rcv_constraint_errors port_rcv_data port_rcv_errors port_rcv_packets "
    "port_rcv_remote_physical_errors port_rcv_switch_relay_errors port_xmit_constraint_errors "
    "port_xmit_data port_xmit_discards port_xmit_packets port_xmit_wait symbol_error "
    "unicast_rcv_packets unicast_xmit_packets"
)
_HW_COUNTERS = (
    "duplicate_request implied_nak_seq_err lifespan local_ack_timeout_err out_of_buffer "
    "out_of_sequence packet_seq_err req_cqe_error req_cqe_flush_error req_remote_access_errors "
    "req_remote_invalid_request resp_cqe_error resp_cqe_flush_error resp_local_length_error "
    "resp_remote_access_errors rnr_nak_retry_err rx_atomic_requests rx_icrc_encapsulated "
    "rx_read_requests rx_write_requests"
)


class Link(NamedTuple):
    """A symbolic link, as it is written."""

    target: str


Tree = dict[str, str | Link]


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A node's hardware: `gpus` GPUs, and what is set otherwise than on a healthy board."""

    node: str
    gpus: int
    nvml: dict[str, str] = dataclasses.field(default_factory=dict)
    down: frozenset[str] = frozenset()  # HCAs
    flaps: dict[str, int] = dataclasses.field(default_factory=dict)  # HCA: times it went down

    def key(self, index: int, name: str, default: str = "") -> str:
        """Return a GPU's setting, or that of all GPUs, as the fake NVML looks it up."""
        return self.nvml.get(f"gpu{index}.{name}", self.nvml.get(f"gpu.{name}", default))

    def number(self, index: int, name: str, default: int) -> int:
        """Return such a setting as a number; `default` also if the name of an error is set."""
        text = self.key(index, name)
        return int(text) if text.isdecimal() else default

    @property
    def driver(self) -> str:
        return self.nvml.get("driver", DRIVER)

    def with_nvml(self, changes: dict[str, str | None]) -> "Hardware":
        """Return this hardware with some keys of the fake NVML set, or removed (None)."""
        merged: dict[str, str | None] = {**self.nvml, **changes}
        kept = {key: value for key, value in merged.items() if value is not None}
        return dataclasses.replace(self, nvml=kept)

    def with_port(self, hca: str, up: bool) -> "Hardware":
        """Return this hardware with the port of an HCA up or down; each time down is counted."""
        if up:
            return dataclasses.replace(self, down=self.down - {hca})
        flaps = {**self.flaps, hca: self.flaps.get(hca, 0) + 1}
        return dataclasses.replace(self, down=self.down | {hca}, flaps=flaps)

    def on_bus(self, index: int) -> bool:
        return self.key(index, "lost") != "absent"


def pci(index: int) -> str:
    """The PCI address of a GPU, "0000:1b:00.0"; the ninth is on a board in the next domain."""
    domain, place = divmod(index, len(_GPU_BUSES))
    return f"{domain:04x}:{_GPU_BUSES[place]:02x}:00.0"


def hca_pci(hca: str) -> str:
    return f"0000:{_HCA_BUSES[HCAS.index(hca)]:02x}:00.0"


def uuid(node: str, index: int) -> str:
    """A GPU's UUID: its own in every node, the same at every boot."""
    digest = hashlib.sha256(f"{node} {index}".encode()).hexdigest()
    return f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"


def serial(node: str, index: int) -> str:
    digest = hashlib.sha256(f"serial {node} {index}".encode()).hexdigest()
    return f"165{int(digest[:12], 16) % 10**10:010d}"


def nvml_state(hardware: Hardware) -> str:
    """The text of nvml.state."""
    lines = [f"count={hardware.gpus}"]
    for index in range(hardware.gpus):
        lines.append(f"gpu{index}.pci={pci(index)}")
        lines.append(f"gpu{index}.uuid={uuid(hardware.node, index)}")
        lines.append(f"gpu{index}.serial={serial(hardware.node, index)}")
    lines += [f"{key}={value}" for key, value in hardware.nvml.items()]
    return "\n".join(lines) + "\n"


# -- /sys -------------------------------------------------------------------------------------


def sys_tree(hardware: Hardware) -> Tree:
    """Return the entries of /sys beside the real ones: paths below /sys."""
    tree: Tree = {}
    for bus in _SWITCH_BUSES:
        ids, address = "0x10de 0x22a3 0x068000", f"0000:{bus:02x}:00.0"
        _pci_device(tree, address, ids, "nvidia-nvswitch", _SWITCH_SLOT)
    for index in range(hardware.gpus):
        ids, slot = "0x10de 0x2330 0x030200", _gpu_slot(hardware, index)
        lost = hardware.key(index, "lost") != ""
        _pci_device(tree, pci(index), ids, "nvidia", slot, lost, hardware.on_bus(index))
    for hca in HCAS:
        _hca(tree, hardware, hca)
    for module, version in (("nvidia", hardware.driver), ("nvidia_uvm", hardware.driver)):
        tree[f"module/{module}/version"] = f"{version}\n"
        tree[f"module/{module}/initstate"] = "live\n"
        tree[f"module/{module}/refcnt"] = "1\n"
    for module in ("mlx5_core", "mlx5_ib"):
        tree[f"module/{module}/initstate"] = "live\n"
    return tree


class _Slot(NamedTuple):
    """A device's PCIe link, as /sys words it."""

    speed: str = "32.0 GT/s PCIe"
    width: str = "16"
    max_speed: str = "32.0 GT/s PCIe"
    max_width: str = "16"


_SWITCH_SLOT = _Slot("16.0 GT/s PCIe", "2", "16.0 GT/s PCIe", "2")


def _gpu_slot(hardware: Hardware, index: int) -> _Slot:
    width = hardware.number(index, "pcie.width", 16)
    speed = _SPEEDS.get(hardware.number(index, "pcie.generation", 5))
    return _Slot(f"{speed} GT/s PCIe" if speed else "Unknown", str(width))


def _place(address: str) -> str:
    """Return a device's directory, which is below a root port of its own."""
    domain, bus, _ = address.split(":")
    root = f"{domain}:{int(bus, 16) - 1:02x}"
    return f"devices/pci{root}/{root}:01.0/{address}"


def _pci_device(
    tree: Tree,
    address: str,
    ids: str,
    driver: str,
    slot: _Slot,
    lost: bool = False,
    there: bool = True,
) -> None:
    """`ids`: vendor, device and class. A lost device's registers read as all ones.

    A device that is not `there` leaves its port.
    """
    place = _place(address)
    port = place.rpartition("/")[0]
    port_slot = slot._replace(speed="2.5 GT/s PCIe", width="0") if lost else slot
    own_slot = slot._replace(speed="Unknown", width="63") if lost else slot
    _pci_files(tree, port, "0x8086 0x352a 0x060400", "../../..", "pcieport", port_slot)
    if there:
        _pci_files(tree, place, ids, "../../../..", driver, own_slot)
    for path in (place, port) if there else (port,):
        tree[f"bus/pci/devices/{path.rpartition('/')[2]}"] = Link(f"../../../{path}")


def _pci_files(tree: Tree, place: str, ids: str, up: str, driver: str, slot: _Slot) -> None:
    vendor, device, cls = ids.split()
    bus = int(place.rpartition("/")[2].split(":")[1], 16)
    files: Tree = {
        "vendor": f"{vendor}\n",
        "device": f"{device}\n",
        "class": f"{cls}\n",
        "subsystem_vendor": f"{vendor}\n",
        "revision": "0xa1\n",
        "enable": "1\n",
        "power_state": "D0\n",
        "numa_node": f"{int(bus >= 0x80)}\n",
        "local_cpulist": "0-7\n",
        "current_link_speed": f"{slot.speed}\n",
        "current_link_width": f"{slot.width}\n",
        "max_link_speed": f"{slot.max_speed}\n",
        "max_link_width": f"{slot.max_width}\n",
        "driver": Link(f"{up}/bus/pci/drivers/{driver}"),
    }
    for kind, (names, total) in _AER.items():
        rows = [*names.split(), f"TOTAL_ERR_{total}"]
        files[f"aer_dev_{kind}"] = "".join(f"{name} 0\n" for name in rows)
    tree.update({f"{place}/{name}": text for name, text in files.items()})


def _hca(tree: Tree, hardware: Hardware, hca: str) -> None:
    address = hca_pci(hca)
    _pci_device(tree, address, "0x15b3 0x1021 0x020700", "mlx5_core", _Slot())
    place = f"{_place(address)}/infiniband/{hca}"
    tree[f"class/infiniband/{hca}"] = Link(f"../../{place}")
    tree[f"{place}/device"] = Link(f"../../../{address}")
    guid = hashlib.sha256(f"{hardware.node} {hca}".encode()).hexdigest()
    words = ":".join(guid[i : i + 4] for i in range(0, 16, 4))
    down = hca in hardware.down
    port = f"{place}/ports/1"
    files: Tree = {
        f"{place}/node_type": "1: CA\n",
        f"{place}/node_guid": f"{words}\n",
        f"{place}/sys_image_guid": f"{words}\n",
        f"{place}/fw_ver": "28.39.3560\n",
        f"{place}/hca_type": "MT4129\n",
        f"{place}/board_id": "MT_0000000838\n",
        f"{place}/node_desc": f"{hardware.node} {hca}\n",
        f"{port}/state": "1: DOWN\n" if down else "4: ACTIVE\n",
        f"{port}/phys_state": "2: Polling\n" if down else "5: LinkUp\n",
        f"{port}/rate": "10 Gb/sec (4X SDR)\n" if down else "400 Gb/sec (4X NDR)\n",
        f"{port}/link_layer": "InfiniBand\n",
        f"{port}/lid": "0x0\n" if down else f"{hex(HCAS.index(hca) + 0x10)}\n",
        f"{port}/sm_lid": "0x0\n" if down else "0x1\n",
    }
    for name in _COUNTERS.split():
        files[f"{port}/counters/{name}"] = "0\n"
    files[f"{port}/counters/link_downed"] = f"{hardware.flaps.get(hca, 0)}\n"
    for name in _HW_COUNTERS.split():
        files[f"{port}/hw_counters/{name}"] = "0\n"
    files[f"{port}/hw_counters/lifespan"] = "10\n"
    tree.update(files)


# -- /proc/driver -----------------------------------------------------------------------------


def proc_tree(hardware: Hardware) -> Tree:
    """Return the entries of /proc/driver beside the real ones."""
    tree: Tree = {
        "nvidia/version": (
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {hardware.driver}  "
            "Release Build  (dvs-builder@U22-A23-20-2)  Sun Mar 23 00:20:12 UTC 2025\n"
            "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
        )
    }
    for index in range(hardware.gpus):
        if hardware.on_bus(index):
            tree[f"nvidia/gpus/{pci(index)}/information"] = _information(hardware, index)
    return tree


def _information(hardware: Hardware, index: int) -> str:
    rows = {
        "Model": GPU_NAME,
        "IRQ": str(100 + index),
        "GPU UUID": uuid(hardware.node, index),
        "Video BIOS": hardware.key(index, "vbios", VBIOS),
        "Bus Type": "PCIe",
        "DMA Size": "52 bits",
        "DMA Mask": "0xfffffffffffff",
        "Bus Location": pci(index),
        "Device Minor": str(index),
        "GPU Firmware": hardware.driver,
        "GPU Excluded": "No",
    }
    return "".join(f"{name + ':':<16} {value}\n" for name, value in rows.items())


# -- differences ------------------------------------------------------------------------------


def changes(old: Tree, new: Tree) -> Iterator[tuple[str, str | Link | None]]:
    """Yield the paths to write (or remove: None) to turn `old` into `new`."""
    for path in old.keys() - new.keys():
        yield path, None
    for path, value in new.items():
        if old.get(path) != value:
            yield path, value
