"""The parent's part in how workers and the device process come to speak: it makes a pair of sockets
for each worker and hands an end to either side, whenever one of the two has started.

The ends go through mailboxes, one for each process and made before its fork, so that nothing has a
name that a stranger could connect to, and nobody but the two keeps a pair open: each sees the other
end as soon as it does.
"""

from __future__ import annotations

import socket
from contextlib import suppress

__all__ = ["Exchange", "receive"]


class Exchange:
    """Mailboxes of all processes.

    Args:
        device_process: its index; smaller ones are the workers'.
    """

    def __init__(self, device_process: int) -> None:
        self._device_process = device_process
        self._boxes: dict[int, socket.socket] = {}

    def mailbox(self, index: int) -> socket.socket:
        """What a process that is about to be forked reads its letters from."""
        if index in self._boxes:
            self._boxes[index].close()
        self._boxes[index], theirs = socket.socketpair()
        return theirs

    def introduce(self, index: int) -> None:
        """Has a process that was forked speak to whom it is to speak to."""
        every = range(self._device_process)
        for worker in every if index == self._device_process else [index]:
            if worker in self._boxes and self._device_process in self._boxes:
                self._connect(worker)

    def close(self) -> None:
        """Leaves the mailboxes to the parent."""
        for box in self._boxes.values():
            box.close()

    def _connect(self, worker: int) -> None:
        name = worker.to_bytes(2)
        one, other = socket.socketpair()
        with one, other, suppress(OSError):  # one that has just ended is started again, and told
            socket.send_fds(self._boxes[self._device_process], [name], [one.fileno()])
            socket.send_fds(self._boxes[worker], [name], [other.fileno()])


def receive(mailbox: socket.socket) -> tuple[int, socket.socket] | None:
    """A letter, in a mailbox that has something to read: which worker speaks through the end that
    is in it, and that end. None once the parent has ended."""
    name, ends, _, _ = socket.recv_fds(mailbox, 2, 1)
    return (int.from_bytes(name), socket.socket(fileno=ends[0])) if ends else None
