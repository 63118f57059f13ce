"""`python -m qkv` is `qkv`."""

from qkv.cli.main import main

if __name__ == "__main__":
    main(prog_name="qkv")
