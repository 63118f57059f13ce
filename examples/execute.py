"""Executes the notebooks of this folder from top to bottom, and stores their outputs in them.

    python examples/execute.py [which-heads ...]

Without names it executes all. An error in a cell ends it, and leaves that notebook as it was.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient

__all__ = ["NOTEBOOKS", "execute"]

NOTEBOOKS: Final = sorted(Path(__file__).parent.glob("*.ipynb"))
_CELL_TIMEOUT_S: Final = 1200


def execute(path: Path) -> Any:
    """Returns the notebook with the outputs of a new kernel.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell has raised.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=_CELL_TIMEOUT_S,
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if not _is_cleared(each)]
    notebook.metadata = {name: notebook.metadata[name] for name in ("kernelspec",)}
    return notebook


def _is_cleared(output: Any) -> bool:
    """Returns True if an output is what a progress bar leaves: blanks on stderr."""
    return bool(output.get("name") == "stderr" and not output.text.strip())


def main() -> None:
    """Executes notebooks and writes them."""
    names = [path.stem for path in NOTEBOOKS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(names)}")
    for path in NOTEBOOKS:
        if path.stem in (parser.parse_args().names or names):
            print(path.name, flush=True)
            nbformat.write(execute(path), path)


if __name__ == "__main__":
    main()
