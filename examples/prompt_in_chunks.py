"""Runs a long prompt in parts, and compares the output with that of the whole prompt.

Start a service with `qkv serve`, then run `python examples/prompt_in_chunks.py`.
The variable QKV_URL has the address of another service.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv import Client


def tokens(count: int) -> dict[str, Any]:
    """Returns tokens of two key heads and four value heads, with the gates of Qwen3-Next."""
    random = np.random.default_rng(0)
    query, key = random.normal(size=(2, 1, 2, count, 64))
    value, gates = random.normal(size=(1, 4, count, 64)), random.random((2, 1, 4, count))
    inputs = {"query": query, "key": key, "value": value, "log_decay": -gates[0], "beta": gates[1]}
    return {name: array.astype(np.float32) for name, array in inputs.items()}


def main() -> None:
    """Prints True: the bits are the same."""
    rule: dict[str, Any] = {"rule": "gated_delta", "normalize_qk": True}
    prompt, outputs, state = tokens(1000), [], None
    with Client() as client:
        whole = client.attend("gated", **prompt, **rule, outputs=["output", "state"])
        for start in range(0, 1000, 300):
            part = {name: x[:, :, start : start + 300] for name, x in prompt.items()}
            run = client.attend("gated", **part, **rule, state=state, outputs=["output", "state"])
            outputs.append(run.output)
            state = run.state
    print(np.concatenate(outputs, 2).tobytes() == whole.output.tobytes())


if __name__ == "__main__":
    main()
