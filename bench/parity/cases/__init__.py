"""The battery: all ways by their names."""

from __future__ import annotations

from bench.parity.cases.events import EVENTS
from bench.parity.cases.options import ENDS, JOBS, OPTIONS
from bench.parity.cases.strangers import STRANGERS
from bench.parity.cases.surroundings import SURROUNDINGS
from bench.parity.cases.waits import WAITS
from bench.parity.way import Way

BATTERY = [*WAITS, *EVENTS, *SURROUNDINGS, *OPTIONS, *JOBS, *ENDS, *STRANGERS]
WAYS: dict[str, Way] = {way.name: way for way in BATTERY}
