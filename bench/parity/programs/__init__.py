"""Programs of users' kinds; they run as files of a job, and import nothing of the benchmark."""
