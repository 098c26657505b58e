"""V0 behind the line protocol; the real one where SERVESPEC_VLLM_PYTHON and _V0_ROOT are set."""

import os
import sys
from collections import Counter

import pytest

import servespec
from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.adapters.fast import FastImplementation
from servespec.conformance.adapters.loading import LoadingError, load, load_vllm_v0, offers
from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.conformance.adapters.v0_process import V0ProcessImplementation
from servespec.conformance.checks.scheduling_v0 import SUITE, check, compare_v0, of_v0
from servespec.conformance.verdicts import Tally, Verdict, run_check
from servespec.conformance.workloads.scheduling_v0 import make_v0_case, v0_matrix
from servespec.reference.contracts.v0 import V0CacheConfig, V0SchedulerConfig

PYTHON, ROOT = os.environ.get("SERVESPEC_VLLM_PYTHON"), os.environ.get("SERVESPEC_VLLM_V0_ROOT")
needs_vllm = pytest.mark.skipif(
    PYTHON is None or ROOT is None,
    reason="SERVESPEC_VLLM_PYTHON and SERVESPEC_VLLM_V0_ROOT are not both set",
)
MATRIX = v0_matrix()


@needs_vllm
@pytest.mark.parametrize("make", [ReferenceImplementation, FastImplementation])
def test_reference_and_fast_decide_as_vllm_does(make):
    tally = Tally()
    with load_vllm_v0(PYTHON, ROOT) as vllm:
        for seed in range(3):
            for combination in MATRIX:
                compare_v0(make_v0_case(combination, 4000 + seed), make(), vllm, tally)
        assert (vllm.name, vllm.version) == ("vllm-v0", "0.5.1")
    print(tally.steps, "steps", dict(tally.counts))
    assert {name for name in SUITE.must_reach if not tally.counts[name]} == set()


@needs_vllm
def test_the_release_knows_no_alignment():
    case = make_v0_case(MATRIX[1], 0, chunk_alignment=4)
    with load_vllm_v0(PYTHON, ROOT) as vllm:
        result = run_check(check, of_v0(case), vllm)
    assert result.verdict is Verdict.FAILED
    assert any("chunk_alignment" in line for line in result.last_lines)


def peer(tmp_path, body, timeout=60.0):
    """A program that speaks the protocol for an altered fast scheduler."""
    script = tmp_path / "peer.py"
    script.write_text(
        "import os, sys, time, types\n"
        "package = types.ModuleType('servespec')\n"
        f"package.__path__ = {list(servespec.__path__)!r}\n"
        "sys.modules['servespec'] = package\n"
        "from dataclasses import replace\n"
        "from servespec.conformance.adapters.server import serve\n"
        "from servespec.fast.scheduling.v0 import Scheduler\n"
        "class Altered(Scheduler):\n"
        "    def schedule(self, now):\n"
        "        output = super().schedule(now)\n"
        f"        {body}\n"
        "        return output\n"
        "class Factory:\n"
        "    name = 'peer'\n"
        "    def make_v0_scheduler(self, scheduler, cache):\n"
        "        return Altered(scheduler, cache)\n"
        "serve(Factory())\n"
    )
    return V0ProcessImplementation([sys.executable, str(script)], timeout=timeout)


def test_a_sound_peer_agrees_and_counts_the_same(tmp_path):
    counts = Counter()
    with peer(tmp_path, "pass") as implementation:
        for combination in MATRIX[::4]:
            case = make_v0_case(combination, 1)
            result = run_check(check, of_v0(case), implementation)
            assert result.divergence is None
            counts.update(result.counts)
            here = run_check(check, of_v0(case), FastImplementation())
            assert here.counts == result.counts
    assert any(name.startswith("gave up") for name in counts)


UNKNOWN = "output = replace(output, scheduled_seq_groups=tuple(replace(g, request_id='ghost') "
UNKNOWN += "for g in output.scheduled_seq_groups))"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("os._exit(3)", "exit status 3"),
        ("time.sleep(60)", "no answer within 1 seconds"),
        ("os.write(1, b'rubbish'); raise KeyError('odd')", "raised KeyError"),
        (UNKNOWN, "unknown request 'ghost'"),
    ],
)
def test_a_failing_peer_is_a_verdict_and_the_next_case_runs(tmp_path, body, reason):
    case = of_v0(make_v0_case(MATRIX[0], 1))
    with peer(tmp_path, body, 1.0 if "sleep" in body else 60.0) as implementation:
        for _ in range(2):
            result = run_check(check, case, implementation)
            assert result.verdict is Verdict.FAILED
            assert reason in result.divergence.got


def test_a_wrong_plan_is_a_divergence(tmp_path):
    case = of_v0(make_v0_case(MATRIX[0], 1))
    with peer(tmp_path, "output = replace(output, preempted=9)") as implementation:
        result = run_check(check, case, implementation)
    assert result.verdict is Verdict.DIVERGED
    assert (result.divergence.field, result.divergence.step) == ("output.preempted", 0)


def test_a_peer_without_v0_says_so(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(
        "import sys, types\n"
        "package = types.ModuleType('servespec')\n"
        f"package.__path__ = {list(servespec.__path__)!r}\n"
        "sys.modules['servespec'] = package\n"
        "from servespec.conformance.adapters.server import serve\n"
        "class Factory:\n"
        "    name = 'peer'\n"
        "serve(Factory())\n"
    )
    with V0ProcessImplementation([sys.executable, str(script)]) as implementation:
        with pytest.raises(ImplementationFailed) as caught:
            implementation.make_v0_scheduler(
                V0SchedulerConfig(), V0CacheConfig(num_gpu_blocks=4)
            ).schedule(0.0)
        assert any("has no make_v0_scheduler" in line for line in caught.value.lines)


def test_the_options_of_vllm_v0(tmp_path):
    for python, root, message in (
        (None, None, "needs --python"),
        (sys.executable, None, "needs --python"),
        ("/no/such", str(tmp_path), "no such file"),
        (sys.executable, str(tmp_path), "holds no vllm/core/scheduler.py"),
    ):
        with pytest.raises(LoadingError, match=message):
            load("vllm-v0", python, root)
    with pytest.raises(LoadingError, match="--root is for"):
        load("fast", None, str(tmp_path))
    (tmp_path / "vllm" / "core").mkdir(parents=True)
    (tmp_path / "vllm" / "core" / "scheduler.py").touch()
    assert offers(load("vllm-v0", sys.executable, str(tmp_path))) == ("make_v0_scheduler",)
