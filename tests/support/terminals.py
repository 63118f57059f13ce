"""Opens pseudo-terminals, for tests of what a command draws on a terminal."""

from __future__ import annotations

import fcntl
import pty
import struct
import termios


def open_terminal(columns: int = 80) -> tuple[int, int]:
    """Returns the two ends of a terminal: the test reads the first, a process writes the second.

    It has a size: tqdm draws no bar on a terminal of 0 x 0.
    """
    screen, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return screen, end
