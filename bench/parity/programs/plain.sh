#!/bin/bash
# A shell script as a rank: it notes where it is, works, and prints a line.
echo "$SLURM_JOB_ID $SLURM_PROCID ${SLURMD_NODENAME:-$(hostname)}" >> "$PARITY_RANKS"
sleep "${1:-2}"
echo "rank $SLURM_PROCID of $SLURM_NTASKS is done"
exit "${2:-0}"
