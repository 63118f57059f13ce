"""`JobExecutor`: runs the jobs of one process, on a device of its own or in device processes."""

from __future__ import annotations

from typing import TypeAlias

from qkv.engine.engine import Engine
from qkv.engine.remote.remote_engine import RemoteEngine

JobExecutor: TypeAlias = Engine | RemoteEngine
"""No caller asks which one it has: both are started, submit, and stop in the same way."""
