"""Files of `torch.save`, which the commands refuse: they are pickles, which may run any code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

from qkv.errors import InvalidContent

COMMAND: Final = ": python -c "
"""Is in front of the program in the error, which has the path of the file as a shell needs it."""
_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")

# some training loops nest the tensors, and those that share memory must be copied
_PROGRAM: Final = (
    "import torch, safetensors.torch as s; d = torch.load({source!r}, weights_only=True, "
    "map_location='cpu'); d = d.get('state_dict', d.get('model', d)); s.save_file("
    "{{k: v.clone().contiguous() for k, v in d.items() if torch.is_tensor(v)}}, {target!r})"
)


def refuse_torch_file(path: Path) -> None:
    """Raises for a file of `torch.save`.

    Raises:
        InvalidContent: the suffix is that of such a file. The error has the command that makes a
            safetensors file of it.
    """
    if path.suffix not in _SUFFIXES:
        return
    program = _PROGRAM.format(source=str(path), target=str(path.with_suffix(".safetensors")))
    # double quotes also work on Windows, but need plain names
    quoted = shlex.quote(program) if re.search(r'["$`\\!]', program) else f'"{program}"'
    raise InvalidContent(
        f"{path} is a pickle, which can run any code. Make a safetensors file of it"
        f"{COMMAND}{quoted}"
    )
