# The work of a rank in four parts.
all: 1 2 3 4
	@echo "rank $$SLURM_PROCID is done"
note:
	@echo "$$SLURM_JOB_ID $$SLURM_PROCID $$SLURMD_NODENAME" >> "$$PARITY_RANKS"
1 2 3 4: note
	@sleep 3
.PHONY: all note 1 2 3 4
