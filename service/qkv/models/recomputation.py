"""The second run of a forward pass inside a backward pass, as activation checkpointing does it."""

from __future__ import annotations

import torch

__all__ = ["is_recomputed"]


def is_recomputed() -> bool:
    """True inside a backward pass: a call there repeats one of the forward pass."""
    return bool(torch._C._current_graph_task_id() != -1)
