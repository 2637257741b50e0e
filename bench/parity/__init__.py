"""Ways to run that end well under srun, each beside robust-srun in one lab."""
