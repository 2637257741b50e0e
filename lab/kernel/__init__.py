"""Nodes with a kernel of their own: user-mode Linux, real cgroups, real OOM kills."""
