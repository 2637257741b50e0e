"""Training on with fewer nodes, as the script sees it: the world, and its shares of the batch."""
