"""Decodes token by token over one connection, after a prompt.

Start a service with `qkv serve`, then run `python examples/token_by_token.py`.
The variable QKV_URL has the address of another service.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv import Client


def main() -> None:
    """Prints True: prompt and tokens have the bits of the whole sequence."""
    random = np.random.default_rng(0)
    query, key, value = random.normal(size=(3, 1, 4, 170, 32)).astype(np.float32)
    sequence = {"query": query, "key": key, "value": value, "beta": random.random((1, 4, 170))}
    rule: dict[str, Any] = {"rule": "delta", "normalize_qk": True}
    with Client() as client:
        whole = client.attend("gated", **sequence, **rule, outputs=["output", "state"])
        prompt = {name: x[:, :, :100] for name, x in sequence.items()}
        run = client.attend("gated", **prompt, **rule, outputs=["output", "state"])
        outputs = [run.output]
        for i in range(100, 170):
            token = {name: x[:, :, i : i + 1] for name, x in sequence.items()}
            run = client.attend(
                "gated", **token, **rule, state=run.state, outputs=["output", "state"]
            )
            outputs.append(run.output)
    print(np.concatenate(outputs, 2).tobytes() == whole.output.tobytes())


if __name__ == "__main__":
    main()
