"""Tests of support/rare_tests.py, with a small repository."""

from __future__ import annotations

import os
import subprocess

import pytest

from support.rare_tests import RareTests, changed_files

pytest_plugins = ["pytester"]

TESTS = """\
import pytest

@pytest.mark.rare("deploy", "bench/clusters.py")
def test_rare():
    pass

def test_other():
    pass
"""
DAY_S = 24 * 3600


def test_rare_test_runs_if_a_commit_of_the_last_days_concerns_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\nmarkers = rare")
    root = pytester.path

    def git(*words: str, day: int = 0) -> None:
        who = ("-c", "user.name=A", "-c", "user.email=a@b.c")
        dates = {"GIT_COMMITTER_DATE": f"@{10**9 + day * DAY_S} +0000"}
        subprocess.run(["git", *who, *words], cwd=root, env=os.environ | dates, check=True)

    def commit(file: str, day: int) -> None:
        (root / file).parent.mkdir(exist_ok=True)
        (root / file).write_text(TESTS if file == "test_it.py" else f"of day {day}")
        git("add", file)
        git("commit", "-q", "-m", file, day=day)

    def is_run() -> bool:
        result = pytester.runpytest_inprocess("-q", plugins=[RareTests(2, root)])
        passed = result.parseoutcomes()["passed"]
        is_told = "test_it.py::test_rare: deploy bench/clusters.py test_it.py" in str(result.stdout)
        assert is_told == (passed == 1)
        return passed == 2

    (root / "test_it.py").write_text(TESTS)
    with pytest.raises(KeyError):  # no test has run, because the paths do not exist
        is_run()
    (root / "deploy").mkdir()
    (root / "bench").mkdir()
    (root / "bench/clusters.py").touch()
    assert is_run()  # there is no repository
    git("init", "-q", "-b", "main")
    assert is_run()  # nor a commit
    commit("test_it.py", day=0)
    assert is_run()
    commit("deployed/a.yml", day=2)
    commit("bench/clusters.py.txt", day=3)
    assert not is_run()
    assert changed_files(root, 2) == {"deployed/a.yml", "bench/clusters.py.txt"}
    git("branch", "old")
    for file, day in (("deploy/b c.yml", 10), ("bench/clusters.py", 20), ("constraints.txt", 30)):
        commit("other", day - 3)
        assert not is_run()
        commit(file, day)
        commit("other", day + 2)
        assert is_run()
    git("checkout", "-q", "old")
    commit("deploy/d.yml", day=31)
    git("checkout", "-q", "main")
    commit("other", day=40)
    assert not is_run()
    git("merge", "-q", "-m", "brings what is older than it", "old", day=41)
    commit("other", day=42)
    assert is_run()
    git("clone", "-q", "--depth", "1", f"file://{root}", str(root / "part"))
    assert changed_files(root / "part", 2) is None
