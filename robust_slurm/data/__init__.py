"""Data that survives: the same samples in the same order, whatever dies (decision 87).

Importing this package imports nothing: a name is loaded when it is first asked for.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .errors import DataError as DataError
    from .errors import SourceStalled as SourceStalled
    from .loader import Loader as Loader
    from .plan import Plan as Plan
    from .sources.arrow_files import arrow as arrow
    from .sources.json_lines import jsonl as jsonl
    from .sources.parquet_files import parquet as parquet
    from .sources.records import records as records
    from .sources.tar_shards import tar as tar

_HOMES = {
    "DataError": "errors",
    "Loader": "loader",
    "Plan": "plan",
    "SourceStalled": "errors",
    "arrow": "sources.arrow_files",
    "jsonl": "sources.json_lines",
    "parquet": "sources.parquet_files",
    "records": "sources.records",
    "tar": "sources.tar_shards",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return globals()[name]
