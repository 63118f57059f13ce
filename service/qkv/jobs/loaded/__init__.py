"""Layers of checkpoints, which the operator loads at start; requests have their names."""
