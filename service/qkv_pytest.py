"""The oracle in pytest: the fixture `qkv_oracle` and the marker `qkv`.

pytest loads this file at every start, wherever qkv is installed. So it stands beside the package,
and imports qkv only inside a test: `import qkv` takes 0.2 s. hypothesis does the same.

PYTEST_DONT_REWRITE: no assert here, and no warning if a program imports this file before pytest.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    import pluggy

    from qkv.testing import Report

DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
"""The dtypes of a marker without `dtype`: those of `verify`, whose module needs torch."""

_MARKER: Final = (
    "qkv(variant, **options): the test calls qkv_oracle, which checks that a function computes "
    "this variant of attention; the options are those of qkv.testing.verify"
)


class Oracle:
    """The value of the fixture `qkv_oracle`, which checks functions in one test.

    Attributes:
        calls: the number of calls so far.
        failure: the error of the last call that failed; None without one.
        summary: that error in one line.
    """

    def __init__(self, item: pytest.Item, dtype: Any) -> None:
        """Reads the markers of a test.

        Args:
            item: the test.
            dtype: the dtype of this test, if the marker makes a test of each; None otherwise.
        """
        self.calls = 0
        self.failure: AssertionError | None = None
        self.summary = ""
        self._dtype = dtype
        self._variant, self._options = _read_markers(item)

    def __repr__(self) -> str:
        """Returns the arguments of the marker: pytest shows them above the source of a test."""
        options = self._options if self._dtype is None else self._options | {"dtype": self._dtype}
        arguments = [repr(self._variant), *(f"{n}={v!r}" for n, v in options.items())]
        return f"Oracle({', '.join(arguments)})"

    def __call__(
        self, function: Callable[..., Any], variant: str | None = None, **options: Any
    ) -> Report:
        """Checks that a function computes a variant, and returns the report.

        It skips the test if the function does not take its dtype, and the marker names no dtypes.

        Args:
            function: as in `qkv.testing.verify`.
            variant: its name; None: that of the marker.
            **options: of `verify`, with parameters of the variant. They replace the marker's.

        Raises:
            AssertionError: the report has a failed check, or no check ran; its text is the message.
            QkvError: the variant or an option is invalid.
        """
        __tracebackhide__ = True
        report = self.verify(function, variant, **options)
        if report.passed:
            return report
        if self._dtype is not None and self._options.get("dtype") is None:
            chosen, merged = self._arguments(variant, options)
            if reason := _find_refusal(function, report, chosen, merged):
                pytest.skip(reason)
        self.failure, self.summary = AssertionError(str(report)), _summarize(report)
        raise self.failure

    def verify(
        self, function: Callable[..., Any], variant: str | None = None, **options: Any
    ) -> Report:
        """Returns the report, and neither fails nor skips the test.

        Raises:
            QkvError: the variant or an option is invalid.
        """
        __tracebackhide__ = True
        from qkv.errors import QkvError
        from qkv.testing import verify

        self.calls += 1
        try:
            chosen, merged = self._arguments(variant, options)
            return verify(function, chosen, **merged)
        except QkvError as error:
            raise error.with_traceback(None) from None  # without the frames of qkv

    def _arguments(self, variant: Any, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Returns the variant and the options of a call. `verify` checks their values.

        Raises:
            QkvError: the variant is missing or unknown, or an option is unknown.
        """
        from qkv.attention import catalogue
        from qkv.errors import InvalidContent
        from qkv.testing import verify

        variant = self._variant if variant is None else variant
        if not isinstance(variant, str):
            known = ", ".join(catalogue.variants())
            raise InvalidContent(
                f"the variant is missing: got {variant!r}, expected one of {known}"
            )
        chosen = catalogue.find(variant)
        signature = inspect.signature(verify).parameters.values()
        options = [p.name for p in signature if p.kind is p.KEYWORD_ONLY]
        parameters = [n for n in chosen.parameters.model_fields if n not in options]
        merged = self._options | given
        for name in sorted(merged.keys() - {*options, *parameters, *chosen.refuses}):
            raise InvalidContent(
                f"no option {name!r}; the options are {', '.join(options)}; "
                f"the parameters of {variant} are {', '.join(parameters) or 'none'}"
            )
        if self._dtype is not None:
            if "dtype" in given:
                raise InvalidContent(
                    f"dtype is not taken by the call: got {given['dtype']!r}, expected it in the "
                    "marker qkv, which makes a test of each dtype"
                )
            merged["dtype"] = self._dtype
        return variant, merged


def _read_markers(item: pytest.Item) -> tuple[Any, dict[str, Any]]:
    """Returns variant and options of a test's markers: those nearer to the test win."""
    variant: Any = None
    options: dict[str, Any] = {}
    for marker in reversed(list(item.iter_markers("qkv"))):
        if marker.args:
            variant = marker.args[0] if len(marker.args) == 1 else marker.args
        options |= marker.kwargs
    return variant, options


def _find_refusal(
    function: Callable[..., Any], report: Report, variant: str, options: dict[str, Any]
) -> str:
    """Returns the reason why a function does not take a dtype; "" if it takes it.

    A function that raises in every dtype is wrong, so this runs the other dtypes too.

    Args:
        function: the function.
        report: of one dtype; it did not pass.
        variant: of the report.
        options: of the report.
    """
    from qkv.testing import verify

    ran, dtype = [check for check in report.checks if not check.not_run], options["dtype"]
    if not ran or not all(check.problem for check in ran):
        return ""
    every = verify(function, variant, **options | {"dtype": None, "gradients": False})
    if any(not check.not_run for check in every.checks if check.dtype == dtype):
        return ""
    return f"{dtype} is not taken: {_first_line(ran[0].problem)}"


def _summarize(report: Report) -> str:
    """Returns the verdict in one line, which begins with what is not cut in a narrow terminal."""
    ran = sum(not check.not_run for check in report.checks)
    failures = report.failures
    if report.diagnosis:
        reason = f"looks like {', '.join(report.diagnosis)}"
    elif failures and failures[0].problem:
        reason = _first_line(failures[0].problem)
    elif failures:
        reason = f"{failures[0].units:.2g} times the budget ({failures[0].name})"
    else:
        reason = report.not_run[-1].not_run if report.not_run else "no inputs"
    count = f"{len(failures)} of {ran} checks failed" if ran else "no check ran"
    return f"{reason}; {report.variant}: {count}"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


# Not `item.stash`, which pytest has since version 7: this file must not break the start of any.
_oracles: Final[dict[pytest.Item, Oracle]] = {}


@pytest.fixture
def qkv_oracle(request: pytest.FixtureRequest) -> Oracle:
    """Checks attention functions: qkv_oracle(function, "softmax", causal=True).

    The marker qkv gives variant and options too, and makes a test of each dtype.
    """
    try:
        import qkv.testing  # noqa: F401
    except ImportError as error:  # torch is missing
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    oracle = Oracle(request.node, getattr(request, "param", None))
    _oracles[request.node] = oracle
    return oracle


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a test of each dtype of the marker."""
    item = metafunc.definition
    if "qkv_oracle" not in metafunc.fixturenames or item.get_closest_marker("qkv") is None:
        return
    dtype = _read_markers(item)[1].get("dtype") or DTYPES
    several = isinstance(dtype, Iterable) and not isinstance(dtype, str)
    metafunc.parametrize(
        "qkv_oracle",
        list(dtype) if several else [dtype],
        indirect=True,
        ids=lambda dtype: str(dtype).removeprefix("torch."),
    )


@pytest.hookimpl(trylast=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Fails a test with the marker that checked no function; it runs after the test."""
    # A marker without a variant at a class or module gives only options to the tests that ask.
    claims = [m for n, m in item.iter_markers_with_node("qkv") if m.args or n is item]
    oracle = _oracles.get(item)
    if claims and (oracle is None or not oracle.calls):
        pytest.fail(
            "qkv_oracle was never called, so the marker qkv checked nothing: "
            "take the fixture qkv_oracle, and call it with the function to check",
            pytrace=False,
        )


@pytest.hookimpl(hookwrapper=True)  # older pytests know no wrapper=True
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pluggy.Result[pytest.TestReport], None]:
    """Puts the verdict of a failed call into the line at the end of pytest's output."""
    outcome = yield
    oracle = _oracles.get(item)
    if oracle and call.excinfo and call.excinfo.value is oracle.failure:
        crash = getattr(outcome.get_result().longrepr, "reprcrash", None)
        if crash is not None:  # None with --tb=native
            crash.message = f"qkv: {oracle.summary}"
    if call.when == "teardown":  # a failure holds the frames of the test, and their tensors
        _oracles.pop(item, None)
