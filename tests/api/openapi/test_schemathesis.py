"""Runs every check of schemathesis against the OpenAPI document and the service.

SCHEMATHESIS_EXAMPLES is the number of random bodies for each operation. By default it is 3, and one
operation of runs and one of gradients are checked, those with the fewest inputs: the others have
the same parts, such as the 300 wrong spellings of a tensor. They differ in what the other test
sends, and in what `test_document.py` compares. A comparison has the same parts too, many times:
half of all bodies. It gets random ones here, and others in `test_compare_refusals.py`. By hand,
with everything:

    SCHEMATHESIS_EXAMPLES=300 make test-all ARGS=tests/api/openapi/test_schemathesis.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qkv.attention import catalogue
from qkv.wire import json, safetensors
from support.fitting_requests import Fitting
from support.paths import ROOT
from support.service import Server

EXAMPLES = os.environ.get("SCHEMATHESIS_EXAMPLES", "")
OTHER_VARIANTS = r"^/v1/(attention|gradients)/(?!linear_layer$)"
QUICK = """
[[operations]]
include-path = "/v1/compare"
phases.coverage.enabled = false
"""
PATHS = [
    f"/v1/{what}/{name}"
    for what in ("attention", "gradients")
    for name, variant in catalogue.variants().items()
    if what == "attention" or variant.backward is not None
]


@pytest.mark.slow
@pytest.mark.rare(
    "service/qkv/api", "service/qkv/wire", "service/qkv/jobs", "tests/support/schemathesis_hooks.py"
)
@pytest.mark.timeout(0)  # a run by hand may take long
def test_every_check_of_schemathesis_passes(serve: Callable[..., Server], tmp_path: Path) -> None:
    """Checks examples, boundaries, random bodies and sequences of requests, valid and invalid."""
    served = serve()
    (tmp_path / "schemathesis.toml").write_text("" if EXAMPLES else QUICK)
    led = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json"),
            *("--max-examples", EXAMPLES or "3", "--generation-deterministic", "--no-color"),
            *(() if EXAMPLES else ("--exclude-path-regex", OTHER_VARIANTS)),
        ],
        cwd=tmp_path,  # it reads the configuration there, and writes files
        env=os.environ | {"SCHEMATHESIS_HOOKS": "support.schemathesis_hooks", "PYTHONPATH": led},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert served.http.get("/livez").status_code == 200


@pytest.mark.parametrize("path", [*PATHS, "/v1/convert", "/v1/compare", "/v1/verify/softmax"])
def test_valid_random_requests_succeed(server: Server, path: str) -> None:
    for seed in range(20):
        drawn = np.random.default_rng(seed)
        dtype = str(drawn.choice(["float64", "float32", "float16", "bfloat16"]))
        body = Fitting(path, seed).document({} if seed % 2 else {"dtype": dtype})
        response = server.http.post(path, content=json.dump(body))
        assert response.status_code == 200, response.text
        file, _ = Fitting(path, seed).body()
        headers = {"Content-Type": safetensors.MEDIA_TYPE}
        response = server.http.post(path, content=file, headers=headers)
        assert response.status_code == 200, response.text
