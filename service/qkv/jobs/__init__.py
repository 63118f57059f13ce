"""Validated requests: a variant, its parameters, and the tensors to run it on."""
