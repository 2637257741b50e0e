"""NVML's numbers and addresses, as pynvml and the kernel write them."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest

from health.nvidia import nvml_ask, nvml_query


@pytest.mark.parametrize(
    ("bus_id", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        (b"00000008:01:00.0", "0008:01:00.0"),
        ("00010000:3B:00.0", "10000:3b:00.0"),
        ("", ""),
    ],
)
def test_pci_addresses_are_the_kernels(bus_id: object, address: str) -> None:
    assert nvml_ask.pci_address(bus_id) == address


def test_the_list_of_fields_is_pynvmls() -> None:
    """Numbers kept for older pynvml agree with the one that is installed."""
    import pynvml

    from health.nvidia import nvml_links, nvml_query

    for mine, name in (
        (nvml_query._FIELD_RECOVERY_ACTION, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
        (nvml_query._FIELD_MEMORY_TEMPERATURE, "NVML_FI_DEV_MEMORY_TEMP"),
        (nvml_query._FIELD_SHUTDOWN_TLIMIT, "NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT"),
        (nvml_query._FIELD_SLOWDOWN_TLIMIT, "NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT"),
        (nvml_links._FIELD_LINK_COUNT, "NVML_FI_DEV_NVLINK_LINK_COUNT"),
        (nvml_links._DATA_LINK["replay"][0], "NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY"),
        (nvml_links._DATA_LINK["recovery"][0], "NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY"),
        (nvml_links._DATA_LINK["crc_flit"][0], "NVML_FI_DEV_NVLINK_ERROR_DL_CRC"),
        (
            nvml_links._NVLINK5["recovery"][0],
            "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS",
        ),
        (
            nvml_links._NVLINK5["fatal"][0],
            "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
        ),
    ):
        assert getattr(pynvml, name) == mine, name
    for mine, name in nvml_query._COMPUTE_MODES.items():
        if name != "exclusive_thread":
            assert getattr(pynvml, f"NVML_COMPUTEMODE_{name.upper()}") == mine
    for mine, name in nvml_links._FABRIC_STATES.items():
        assert getattr(pynvml, f"NVML_GPU_FABRIC_STATE_{name.upper()}") == mine


@pytest.mark.parametrize(("margin", "slowdown"), [(53, 87), (1, 35), (0, None), (-5, None)])
def test_a_margin_that_is_not_above_0_gives_no_threshold(margin: int, slowdown: int | None) -> None:
    """Cool, healthy boards tell such ones; see nvml_query._margins."""

    class Nvml:
        NVMLError = RuntimeError

        def nvmlDeviceGetMarginTemperature(self, handle: object) -> int:
            return margin

    class Asked:
        nv, handle = Nvml(), None
        device: ClassVar = {"errors": {}}

        def fields(self, *numbers: int) -> list[int]:
            return [-2, -8]

        def checked(self, value: int) -> int:
            return value

    values = {"gpu": 32}
    nvml_query._margins(cast("Any", Asked()), values)
    assert values.get("slowdown") == slowdown
