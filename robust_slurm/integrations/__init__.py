"""Checkpoints in memory for training frameworks: one module for each, imported by its own name.

``lightning`` (Lightning's Callback), ``transformers`` (Hugging Face's TrainerCallback),
``torchtitan`` and ``megatron``. Importing this package imports none of them, and not torch.
docs/frameworks.md says for each what is carried over and what is not.
"""
