"""The hooks that slurmctld runs (PrologSlurmctld, EpilogSlurmctld): optional."""
