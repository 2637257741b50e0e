"""The error counters of links and devices: names in /sys, reading and weight (pure)."""

from __future__ import annotations

from collections.abc import Mapping

# InfiniBand (Documentation/ABI/stable/sysfs-class-infiniband): a bad cable, port or transceiver
# makes these grow.
LINK_COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
# Retransmissions, under hw_counters (mlx5).
RETRY_COUNTERS = (
    "local_ack_timeout_err",
    "packet_seq_err",
    "out_of_sequence",
    "rnr_nak_retry_err",
)
AER_KINDS = ("fatal", "nonfatal", "correctable")
# Requests that a device does not support: drivers send them while they probe it.
_HARMLESS = frozenset({"UnsupReq"})
LARGEST = (1 << 63) - 1
# The gravest first; a non-fatal error of PCIe is uncorrected, too.
_GRAVE = (("fatal", "uncorrected", "failed"), ("link_downed", "carrier_down"), ("symbol", "crc"))


def parse_count(text: str) -> int | None:
    """A counter's value; None if the text is not a count."""
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(LARGEST))):
        return None
    return value if (value := int(text)) <= LARGEST else None


def parse_aer(content: str) -> dict[str, int]:
    """The lines "name number" of aer_dev_*; the total ("TOTAL_ERR_FATAL") among them."""
    out = {}
    for line in content.splitlines():
        name, _, text = line.strip().rpartition(" ")
        if name and (value := parse_count(text)) is not None:
            out[name.strip()] = value
    return out


def count_aer(counters: Mapping[str, int]) -> int:
    """The number of errors without harmless ones; an error may be of several kinds."""
    total = max((n for name, n in counters.items() if name.startswith("TOTAL")), default=0)
    named = sum(n for name, n in counters.items() if name in _HARMLESS)
    return max(0, total - named)


def weight(name: str) -> int:
    """Rank a counter that has grown, 0 the gravest: lost data, links, damaged transfers, others."""
    found = (at for at, words in enumerate(_GRAVE) if any(word in name for word in words))
    return next(found, len(_GRAVE))


def costs_time(name: str) -> bool:
    """False for errors that a GPU corrects in passing; the host's memory interrupts the CPU."""
    return not (name.startswith("GPU ") and name.endswith(" corrected ECC errors"))
