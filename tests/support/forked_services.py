"""Services for short runs of benchmarks, as forks of a process that has imported the package."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from service import Service

from support.processes import running_command


@contextmanager
def forked_service(program: Sequence[str] = ("-m", "qkv"), **settings: str) -> Iterator[Service]:
    """Runs a service like `service.running_service` of the benchmarks, but starts it quicker.

    Args:
        program: Python's arguments for a program with the arguments of `qkv`.
        **settings: further QKV_ variables.
    """
    module, *more = program if program[0] != "-m" else program[1:]
    words = (*more, "serve", "--port", "0")
    with running_command(*words, module=Path(module).stem, **settings) as process:
        assert process.url
        found = re.search(r"http://(\S+):(\d+) \(\w+, (\d+) worker", process.lines[0])
        assert found is not None, process.lines
        yield Service((found[1], int(found[2])), process.popen.pid, int(found[3]))
        assert process.end() == 0
