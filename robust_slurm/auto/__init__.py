"""The hook that sees training steps without a change to the script.

``HOOK_DIR`` goes in front of the rank's PYTHONPATH; the interpreter then imports
``sitecustomize`` from there at its start.
"""

from pathlib import Path

HOOK_DIR = str(Path(__file__).resolve().parent)
