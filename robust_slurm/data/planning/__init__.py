"""Pure: which samples a step has, in which rows, for whom."""
