"""Corpora: files of several formats as parts of records."""

from robust_slurm.data.sources.arrow_files import arrow
from robust_slurm.data.sources.json_lines import jsonl
from robust_slurm.data.sources.parquet_files import parquet
from robust_slurm.data.sources.tar_shards import tar

__all__ = ["arrow", "jsonl", "parquet", "tar"]
