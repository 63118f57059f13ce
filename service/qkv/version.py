"""The version of qkv."""

__version__ = "0.1.0"
