"""The `qkv` command."""
