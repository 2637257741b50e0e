"""The registers in NVLink messages, decoded: Xids 144 to 150 (NVLink 5) and 74 (before). Pure.

Source: NVIDIA's Xid catalogue, table "XID 144-150 Decode" and the guidance to Xid 74. A message
of 144 to 150 looks like

    NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000 …)

unit, severity, cross containment, injected or not, link, and the words: the first one holds unit
and detail (bits 20 to 25), the second one is the error status.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from health.nvidia.xid_catalog import NVLINK5

FIRST, LAST = 144, 150
# Patterns are compiled at their first use.
_MESSAGE = (
    r"(\w[\w/ ]{0,40}?)\s+(Non-?fatal|Fatal)\s+XC\d+\s+i\d+\s+Link\s+(-?\d{1,4})\s+"
    r"\(0x([0-9a-fA-F]{1,8})[ ,]+0x([0-9a-fA-F]{1,8})"
)
_WORD = r"0x[0-9a-fA-F]{1,8}"
_REGISTERS = rf"on link\s+(\d{{1,4}})\s*\(({_WORD}(?:,\s*{_WORD}){{6}})\)"


class Link5(NamedTuple):
    """One message of 144 to 150. ``reset``: the GPU needs a reset before new work."""

    unit: str
    fatal: bool
    link: int
    detail: int  # bits 20 to 25 of the first word
    status: int
    known: bool  # the catalogue has a rule for it; otherwise the severity decided
    reset: bool


class Link4(NamedTuple):
    """One message of 74. ``reset`` is False where every bit set may be ignored."""

    link: int
    words: tuple[int, ...]
    reset: bool


def read(code: int, text: str) -> Link5 | None:
    """Decode a message of 144 to 150; None when it has not the known form."""
    match = re.search(_MESSAGE, text, re.IGNORECASE)
    if not match:
        return None
    unit, severity, link, first, second = match.groups()
    info, status = int(first, 16), int(second, 16)
    fatal = severity.lower() == "fatal"
    detail = info >> 20 & 0x3F
    answer = _rule(code, unit.split()[-1] if code != 150 else unit, info, detail, status)
    known = answer is not None
    return Link5(unit, fatal, int(link), detail, status, known, fatal if answer is None else answer)


def _rule(code: int, unit: str, info: int, detail: int, status: int) -> bool | None:
    """True if the catalogue asks for a reset; None when it does not know these registers.

    Where the status is a set of bits, each bit has a row of its own and the hardest one counts.
    """
    rows = {
        bits: (reset, promoted)
        for row_code, units, row_detail, bits, reset, promoted in NVLINK5
        if row_code == code and unit in units and row_detail == detail
    }
    if -1 in rows:
        return rows[-1][0]
    if status in rows:
        found = [rows[status]]
    else:
        bits = [1 << n for n in range(32) if status >> n & 1]
        if not bits or any(bit not in rows for bit in bits):
            return None
        found = [rows[bit] for bit in bits]
    promotion = _promoted(info)
    return any(reset or (promoted and promotion) for reset, promoted in found)


def _promoted(info: int) -> bool:
    """True if RLW_RXPIPE says "promoted to fatal": bit 10 before driver 575, bit 7 since then.

    Which of the two layouts a word has shows in the unit's own bits: 0x0c2 in bits 0 to 9, or
    0x06 in bits 0 to 6.
    """
    if info & 0x3FF == 0x0C2:
        return bool(info >> 10 & 1)
    return info & 0x7F == 0x06 and bool(info >> 7 & 1)


# Bits of Xid 74's seven registers that ask for nothing (NVIDIA's guidance, Hopper): word -> mask.
_HARMLESS_74 = {
    0: 1 << 0 | 1 << 23 | 1 << 30,
    4: 1 << 20 | 1 << 23 | 1 << 26 | 1 << 29,  # a threshold of corrected errors
}


def read74(text: str) -> Link4 | None:
    """Decode a message of 74; None when it has not the known form."""
    match = re.search(_REGISTERS, text)
    if not match:
        return None
    words = tuple(int(word, 16) for word in match[2].split(","))
    reset = not any(words) or any(
        word & ~_HARMLESS_74.get(place, 0) for place, word in enumerate(words)
    )
    return Link4(int(match[1]), words, reset)
