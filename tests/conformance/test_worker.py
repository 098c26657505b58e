"""A worker answers whatever the implementation does to it, and within the limit of a line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from servespec.conformance import pool, worker
from servespec.conformance.adapters.loading import LoadingError
from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.conformance.cases import files, replay
from servespec.conformance.cases.case import Case, CaseFile
from servespec.conformance.checks.scheduling import check
from servespec.conformance.pool import WorkerPool
from servespec.conformance.verdicts import Divergence, Verdict, run_check
from servespec.conformance.workloads.scheduling import make_case, matrix

MISBEHAVING = """
import os
from servespec.conformance.adapters.reference import ReferenceImplementation

class Misbehaving(ReferenceImplementation):
    name = "mis\\udcffbehaving"

    def make_scheduler(self, scheduler, cache, speculative):
        if scheduler.max_num_seqs == 1:
            raise KeyboardInterrupt
        if scheduler.max_num_seqs == 2:
            raise RuntimeError("bad \\udcff \\x1b[31m")
        if scheduler.max_num_seqs == 3:
            os.closerange(0, 64)
        return super().make_scheduler(scheduler, cache, speculative)
"""


def case_of(max_num_seqs: int) -> Case:
    config, workload = make_case(matrix()[0], 1)
    scheduler = replace(config.scheduler, max_num_seqs=max_num_seqs)
    return Case(suite="scheduling", config=replace(config, scheduler=scheduler), workload=workload)


def test_the_reason_of_a_failure_is_what_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "misbehaving.py").write_text(MISBEHAVING)
    monkeypatch.chdir(tmp_path)
    with WorkerPool("misbehaving:Misbehaving") as workers:
        assert workers.hello.name == r"mis\udcffbehaving"
        got = []
        for max_num_seqs in (1, 2, 3):
            result = workers.run(case_of(max_num_seqs))
            assert result.verdict is Verdict.FAILED
            assert result.divergence is not None
            got.append(result.divergence.got)
        assert workers.run(case_of(4)).verdict is Verdict.EQUAL
    assert got[:2] == [
        "make_scheduler raised KeyboardInterrupt",
        r"make_scheduler raised RuntimeError: bad \udcff \x1b[31m",
    ]
    assert got[2].startswith("the process closed its standard output")


def test_loading_may_take_as_long_as_a_case_or_a_little_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looping.py").write_text("while True: pass")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pool, "_LOADING_SECONDS", 0.5)
    with pytest.raises(LoadingError) as caught:
        WorkerPool("looping:Thing", time_limit=1.5)
    assert (
        str(caught.value) == "cannot load 'looping:Thing': it was still loading after 1.5 seconds"
    )
    with pytest.raises(LoadingError, match=r"after 0\.5 seconds"):
        WorkerPool("looping:Thing", time_limit=0.25)


def test_steps_that_are_too_large_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_check(check, case_of(4), ReferenceImplementation(), keep_expected=True)
    assert worker.within_limit(result) == result
    sizes = [len(msgspec.json.encode(step)) for step in result.expected]
    monkeypatch.setattr(worker, "MAX_EXPECTED_BYTES", sum(sizes[:3]) + 1)
    cut = worker.within_limit(result)
    assert cut.expected == result.expected[:3]
    assert cut.expected_left_out == len(sizes) - 3 > 0


def test_a_large_pool_is_replayed_and_its_file_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    case = case_of(4)
    cache = replace(case.config.cache, num_gpu_blocks=2**18)
    case = replace(case, config=replace(case.config, cache=cache))
    one = (replace(case.workload.steps[0], add=case.workload.steps[0].add[:1]),)
    case = replace(case, workload=replace(case.workload, steps=one, max_steps=6))
    content = CaseFile(
        spec_version="0.1",
        implementation="reference",
        case=case,
        divergence=Divergence(field="x", expected="1", got="2"),
    )
    files.write(tmp_path / "case.json", content)
    again = replay.replay(tmp_path / "case.json", None)
    assert again.result.divergence is None
    assert again.notes == (
        f"the reference's steps from {len(again.result.expected)} on are too large to keep",
    )
    files.write(tmp_path / "kept.json", replace(content, expected=again.result.expected))
    assert files.read(tmp_path / "kept.json").expected == again.result.expected
