#!/bin/bash
# The launcher script that many clusters pass around: it derives torch's variables from Slurm's.
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
trap 'kill -TERM $child' TERM
"$@" &
child=$!
wait $child
code=$?
echo "rank $RANK: exit code $code"
exit $code
