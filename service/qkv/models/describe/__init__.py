"""Describes the attention layers of a model of transformers, by running it: `qkv describe`."""
