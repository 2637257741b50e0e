"""What slurmctld runs when a job starts and ends (PrologSlurmctld, EpilogSlurmctld): optional."""
