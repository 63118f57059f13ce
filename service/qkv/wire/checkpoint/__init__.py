"""Checkpoints of models: safetensors files, read tensor by tensor."""
