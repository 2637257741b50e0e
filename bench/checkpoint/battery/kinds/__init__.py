"""The kinds of training loops, a module a family."""
