"""Runs the command `qkv` for `python -m qkv`."""

from qkv.cli.main import main

if __name__ == "__main__":
    main(prog_name="qkv")
