"""The floors by GPU model."""

from __future__ import annotations

import pytest

from health.active.judging import profiles


def test_floors_lie_between_half_speed_and_what_healthy_gpus_reach() -> None:
    """Figures that sites publish of healthy machines pass; half a link or locked clocks do not."""
    healthy = [
        ("NVIDIA H100 80GB HBM3", "bf16_tflops", 620.0),
        ("NVIDIA H100 80GB HBM3", "memory_gbps", 2900.0),
        ("NVIDIA H100 80GB HBM3", "h2d_gbps", 45.0),
        ("NVIDIA H100 80GB HBM3", "nccl_tests_busbw_gbps", 360.0),
        ("NVIDIA H100 80GB HBM3", "p2p_gbps", 380.0),
        ("NVIDIA H100 PCIe", "bf16_tflops", 400.0),
        ("NVIDIA H200", "memory_gbps", 4000.0),
        ("NVIDIA A100-SXM4-80GB", "bf16_tflops", 250.0),
        ("NVIDIA A100-SXM4-80GB", "h2d_gbps", 24.8),
        ("NVIDIA A100-SXM4-80GB", "nccl_tests_busbw_gbps", 228.0),
        ("NVIDIA L40S", "bf16_tflops", 220.0),
    ]
    for model, value, reached in healthy:
        floor = profiles.floor(model, value)
        assert floor is not None and reached / 2 < floor.limit < reached, (model, value)


@pytest.mark.parametrize(
    ("model", "value"),
    [
        ("cpu", "fp32_tflops"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16_tflops"),
        ("NVIDIA GH200 480GB", "bf16_tflops"),
        ("NVIDIA H200", "seconds"),
        ("NVIDIA L40S", "p2p_gbps"),
        ("NVIDIA A100-SXM4-80GB", "fp8_tflops"),
        ("NVIDIA GB200", "h2d_gbps"),
        ("NVIDIA H100 80GB HBM3", "busbw_gbps"),  # of our own all-reduce
    ],
)
def test_what_is_not_known_has_no_floor(model: str, value: str) -> None:
    assert profiles.floor(model, value) is None


def test_a_floor_says_where_it_is_from() -> None:
    floor = profiles.floor("NVIDIA H200", "bf16_tflops")
    assert floor is not None
    assert floor.source == "0.55 of the published 989.5 of NVIDIA H200"
    assert all(profiles.floor(m, v) for m in profiles.PROFILES for v in profiles.peaks(m))


@pytest.mark.parametrize(
    ("value", "proof"),
    [
        ("bf16_tflops", True),
        ("memory_gbps", True),
        ("h2d_gbps", False),
        ("d2h_gbps", False),
        ("p2p_gbps", False),
        ("nccl_tests_busbw_gbps", False),
    ],
)
def test_a_published_floor_of_a_link_is_no_proof_and_a_sites_own_is(
    value: str, proof: bool
) -> None:
    published = profiles.floor("NVIDIA H200", value)
    assert published is not None and published.proof is proof
    own = profiles.with_site({"NVIDIA H200": {value: 1}})("NVIDIA H200", value)
    assert own is not None and own.proof


def test_a_site_sets_and_removes_floors() -> None:
    floors = profiles.with_site(
        {
            "NVIDIA H200": {"bf16_tflops": 600, "h2d_gbps": 0, "busbw_gbps": 100},
            "cpu": {"fp32_tflops": 0.5},
        }
    )
    bus = floors("NVIDIA H200", "busbw_gbps")
    assert bus is not None and bus.limit == 100
    own = floors("NVIDIA H200", "bf16_tflops")
    assert own is not None and own.limit == 600 and "robust.toml" in own.source
    assert floors("NVIDIA H200", "h2d_gbps") is None
    assert floors("cpu", "fp32_tflops") is not None
    other = ("NVIDIA H200", "d2h_gbps")
    assert floors(*other) == profiles.floor(*other)


def test_a_floor_of_no_value_is_refused() -> None:
    with pytest.raises(ValueError, match="use one of fp64_tflops") as refused:
        profiles.with_site({"NVIDIA H200": {"bf16": 600}})
    assert 'active.floors."NVIDIA H200"' in str(refused.value)
