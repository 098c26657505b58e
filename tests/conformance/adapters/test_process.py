"""An implementation in a process of its own, well and unwell."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

import servespec
from servespec.conformance.adapters.failure import CallFailed, ImplementationFailed
from servespec.conformance.adapters.process import ProcessImplementation
from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.conformance.checks.scheduling import compare
from servespec.conformance.verdicts import Tally
from servespec.conformance.workloads.scheduling import make_case, matrix
from servespec.reference.contracts import (
    CacheConfig,
    KVCacheGroup,
    Request,
    SchedulerConfig,
    SchedulerOutput,
)

SCHEDULER = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16)
CACHE = CacheConfig(
    num_gpu_blocks=9,
    block_size=4,
    groups=(KVCacheGroup(layer_type="full_attention", layer_indices=(0,)),),
)
REQUEST = Request(request_id="r0", prompt_token_ids=(1, 2, 3))

# A peer that answers hello and open as it should, and then does what a test asks of it.
PEER = """
import json, os, sys, time

def say(line, results, **more):
    print(json.dumps({"id": line["id"], "results": results, **more}), flush=True)

for text in sys.stdin:
    line = json.loads(text)
    names = [call["call"] for call in line["calls"]]
    if names == ["hello"]:
        say(line, [{"protocol": PROTOCOL, "name": "peer", "version": "1"}])
        continue
    if names == ["open"]:
        say(line, [None])
        continue
    MISBEHAVE
"""

OUTPUT = """{"num_scheduled_tokens": {"r0": 3}, "total_num_scheduled_tokens": 3}"""


@pytest.fixture
def peer() -> Iterator[Callable[..., ProcessImplementation]]:
    made: list[ProcessImplementation] = []

    def make(misbehave: str, protocol: int = 1, **options: float) -> ProcessImplementation:
        body = textwrap.indent(textwrap.dedent(misbehave).strip(), " " * 4).strip()
        script = PEER.replace("MISBEHAVE", body).replace("PROTOCOL", str(protocol))
        made.append(ProcessImplementation([sys.executable, "-c", script], **options))
        return made[-1]

    yield make
    for implementation in made:
        implementation.close()


def schedule(implementation: ProcessImplementation) -> SchedulerOutput:
    scheduler = implementation.make_scheduler(SCHEDULER, CACHE)
    scheduler.add_request(REQUEST)
    return scheduler.schedule()


@pytest.mark.parametrize(
    ("misbehave", "reason", "last_line"),
    [
        (
            "print('the pool is gone', file=sys.stderr, flush=True); os._exit(3)",
            "the process ended with exit status 3",
            "the pool is gone",
        ),
        ("os.kill(os.getpid(), 9)", "the process was ended by SIGKILL", None),
        ("os.close(1); time.sleep(60)", "the process closed its standard output", None),
        (
            "os.close(1); time.sleep(1); os._exit(4)",
            "the process closed its standard output and ended with exit status 4",
            None,
        ),
        ("print('hello?', flush=True)", "sent a line that is no reply", None),
        ("sys.stdout.buffer.write(b'\\xff\\xfe\\n'); sys.stdout.flush()", "is no reply", None),
        ("print('[' * 100000, flush=True)", "sent a line that is no reply", None),
        ("line['id'] += 1; say(line, [None, {}])", "results for line", None),
        ("say(line, [])", "of 2 calls with 0 results", None),
        ("say(line, [None, 7])", "answered schedule with what is no answer", None),
        (
            "say(line, [None, {'num_scheduled_tokens': {'r0': 'many'}}])",
            "Expected `int`, got `str`",
            None,
        ),
        (
            "say(line, [None, {'num_scheduled_tokens': {'r9': 1}}])",
            "scheduled an unknown request 'r9'",
            None,
        ),
        (
            "say(line, [None, {'scheduled_cached_reqs': {'req_ids': ['r0']}}])",
            "0 entries in scheduled_cached_reqs.new_block_ids for 1 requests",
            None,
        ),
        (
            "say(line, [], error={'call': 0, 'type': 'OSError', 'message': 'disk full'})",
            "add_request raised OSError",
            "disk full",
        ),
        (
            "say(line, [], error={'call': 99, 'type': 'OSError', 'message': ''})",
            "a call raised OSError",
            None,
        ),
    ],
)
def test_a_peer_that_answers_wrongly_is_a_failure_with_its_last_lines(
    peer: Callable[..., ProcessImplementation], misbehave: str, reason: str, last_line: str | None
) -> None:
    with pytest.raises(ImplementationFailed) as caught:
        schedule(peer(misbehave))
    assert reason in caught.value.reason
    assert last_line is None or last_line in caught.value.lines


def test_a_peer_that_hangs_is_a_failure(peer: Callable[..., ProcessImplementation]) -> None:
    misbehave = "print('thinking', file=sys.stderr, flush=True); time.sleep(60)"
    with pytest.raises(ImplementationFailed, match=r"no answer within 0\.5 seconds") as caught:
        schedule(peer(misbehave, timeout=0.5))
    assert caught.value.lines == ("thinking",)


def test_a_peer_that_does_not_read_is_a_failure(
    peer: Callable[..., ProcessImplementation],
) -> None:
    implementation = peer("time.sleep(60)", timeout=0.5)
    scheduler = implementation.make_scheduler(SCHEDULER, CACHE)
    for number in range(3000):  # more than a pipe holds
        scheduler.add_request(Request(request_id=f"r{number}", prompt_token_ids=(1,) * 15))
    with pytest.raises(ImplementationFailed, match="no answer within"):
        scheduler.schedule()


def test_a_line_without_end_is_a_failure(peer: Callable[..., ProcessImplementation]) -> None:
    implementation = peer("while True: sys.stdout.write('x' * 65536)")
    implementation.start()
    process = implementation._process
    assert process is not None
    process.max_line_bytes = 1 << 20
    with pytest.raises(ImplementationFailed, match="a line of more than 1048576 bytes"):
        schedule(implementation)


def test_a_flood_on_standard_error_neither_blocks_nor_grows(
    peer: Callable[..., ProcessImplementation],
) -> None:
    flood = f"""
    for n in range(20000):
        print('line', n, 'x' * 1000, file=sys.stderr)
    say(line, [None, {OUTPUT}]) if 'schedule' in names else os._exit(1)
    """
    implementation = peer(flood)
    assert schedule(implementation).num_scheduled_tokens == {"r0": 3}
    process = implementation._process
    assert process is not None
    assert len(process._lines) <= 20
    assert max(map(len, process._lines)) <= 400


def test_a_peer_of_another_protocol_is_refused(
    peer: Callable[..., ProcessImplementation],
) -> None:
    with pytest.raises(ImplementationFailed, match="speaks version 9 of the protocol, not 1"):
        schedule(peer("pass", protocol=9))


def test_a_program_that_is_not_there_is_a_failure() -> None:
    with pytest.raises(ImplementationFailed, match="cannot start 'no-such-program'"):
        ProcessImplementation(["no-such-program"]).start()


def test_the_run_goes_on_in_a_fresh_process(peer: Callable[..., ProcessImplementation]) -> None:
    implementation = peer(
        f"""
        if line['handle'] == 1:
            os._exit(1)
        say(line, [None, {OUTPUT}])
        """
    )
    with pytest.raises(ImplementationFailed):
        schedule(implementation)
    assert schedule(implementation).num_scheduled_tokens == {"r0": 3}


def test_a_step_that_is_not_in_flight_is_refused(
    peer: Callable[..., ProcessImplementation],
) -> None:
    implementation = peer(f"say(line, [None, {OUTPUT}] if len(names) == 2 else [[]])")
    scheduler = implementation.make_scheduler(SCHEDULER, CACHE)
    scheduler.add_request(REQUEST)
    output = scheduler.schedule()
    assert scheduler.update_from_output(output, {"r0": (4,)}) == ()
    with pytest.raises(ValueError, match="no step in flight"):
        scheduler.update_from_output(output, {"r0": (4,)})


def served_reference(before: str = "pass") -> ProcessImplementation:
    script = f"""
    import sys, types
    package = types.ModuleType("servespec")
    package.__path__ = sys.argv[1:]
    sys.modules["servespec"] = package
    from servespec.conformance.adapters.reference import ReferenceImplementation
    from servespec.conformance.adapters.server import serve
    class Chatty(ReferenceImplementation):
        def make_scheduler(self, *configs):
            print("this goes to standard error", flush=True)
            {before}
            return super().make_scheduler(*configs)
    serve(Chatty(), version="1.0")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), *servespec.__path__]
    return ProcessImplementation(command)


def test_a_served_scheduler_is_the_scheduler_itself() -> None:
    tally = Tally()
    with served_reference() as implementation:
        for combination in matrix()[::9]:
            config, workload = make_case(combination, 1)
            compare(config, workload, ReferenceImplementation(), implementation, tally, keep=False)
        assert (implementation.name, implementation.version) == ("reference", "1.0")
    counts = tally.counts
    print(tally.steps, dict(counts))
    for happened in ("preemptions", "aborts", "resets", "pauses", "drafts", "block_copies"):
        assert counts[happened] > 0, happened


@pytest.mark.parametrize(
    ("raises", "type_", "text"),
    [
        ("RuntimeError('bad ' + chr(0xdcff))", "RuntimeError", r"bad \udcff"),
        ("KeyboardInterrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("SystemExit(3)", "SystemExit", "SystemExit: 3"),
    ],
)
def test_a_served_scheduler_may_raise_anything(raises: str, type_: str, text: str) -> None:
    with served_reference(f"raise {raises}") as implementation:
        with pytest.raises(CallFailed) as caught:
            implementation.make_scheduler(SCHEDULER, CACHE)
        assert caught.value.reason == f"open raised {type_}"
        assert text in caught.value.lines[-1]
        with pytest.raises(CallFailed):
            implementation.make_scheduler(SCHEDULER, CACHE)


def test_texts_of_failures_are_printable_and_short() -> None:
    failed = ImplementationFailed("red \x1b[31m \udcff" + "x" * 1000, ["a\x00", "é"])
    assert failed.reason.startswith(r"red \x1b[31m \udcffxxx")
    assert len(failed.reason) < 450
    assert failed.lines == (r"a\x00", "é")


def test_schedulers_of_one_process_are_independent_and_are_forgotten() -> None:
    with served_reference() as implementation:
        first = implementation.make_scheduler(SCHEDULER, CACHE)
        second = implementation.make_scheduler(SCHEDULER, CACHE)
        first.add_request(REQUEST)
        second.add_request(REQUEST)
        assert first.schedule() == second.schedule()
        first.add_request(Request(request_id="r1", prompt_token_ids=(7,)))
        assert first.snapshot().waiting == ("r1",)
        assert second.snapshot().waiting == ()
        del first
        assert len(implementation._dropped) == 1
        third = implementation.make_scheduler(SCHEDULER, CACHE)
        assert not implementation._dropped
        assert third.snapshot().running == ()


def test_an_error_of_a_served_scheduler_names_the_call_and_the_process_lives_on() -> None:
    with served_reference() as implementation:
        scheduler = implementation.make_scheduler(SCHEDULER, CACHE)
        scheduler.add_request(REQUEST)
        scheduler.add_request(REQUEST)
        with pytest.raises(ImplementationFailed) as caught:
            scheduler.schedule()
        assert caught.value.reason == "add_request raised DuplicateRequestError"
        assert "request id 'r0'" in caught.value.lines[-1]
        assert schedule(implementation).num_scheduled_tokens == {"r0": 3}
