"""Parameters of variants that compute a score for each pair of a query and a key."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Factor = Annotated[float, Field(ge=-1e9, le=1e9)]
_Cap = Annotated[float, Field(ge=1e-30, le=1e9)]  # 1 / cap is a float32

Scale = Annotated[_Factor | None, Field(description="Factor of the scores. By default 1/sqrt(D).")]
Softcap = Annotated[
    _Cap | None,
    Field(
        description="Scores become softcap * tanh(score / softcap), before the mask. By default "
        "there is no cap."
    ),
]
Window = Annotated[
    tuple[_Count | None, _Count | None] | None,
    Field(
        description="The number of keys that a query sees before and after its position, as "
        "[left, right]. By default there is no limit on either side."
    ),
]
