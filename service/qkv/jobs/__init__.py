"""Validated requests: what to compute, and on which tensors."""
