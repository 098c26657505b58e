"""The command's edges: what is refused before a run, and what a run never loses."""

import errno
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from servespec.conformance import output
from servespec.conformance.bench import engine as engine_bench
from servespec.conformance.cli import main
from servespec.conformance.faults import catalogue

FAULT = "servespec.conformance.faults:one_label"


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def servespec(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], prog_name="servespec")


def refused(*arguments: object) -> str:
    result = servespec(*arguments)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("servespec: ")
    return line


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system without files")
def test_places_that_cannot_be_written_are_refused_before_the_run(tmp_path: Path) -> None:
    check = ("check", "--impl", FAULT, "--suite", "batch", "--cases", 1, "--jobs", 1)
    for option in ("--json", "--junit"):
        assert "cannot write /proc/x.out" in refused(*check, option, "/proc/x.out")
    assert "cannot write /proc/x/case" in refused(*check, "--out", "/proc/x")
    assert "both name same" in refused(*check, "--json", "same", "--junit", "same")
    (tmp_path / "case.json").write_text("{}")
    assert "cannot write /proc/x.json" in refused("shrink", "case.json", "--out", "/proc/x.json")
    python = ("--python", sys.executable)
    assert "cannot write /proc/x" in refused("matrix", *python, "--out", "/proc/x")
    assert "cannot write /proc/x" in refused("record", *python, "/proc/x")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "neither a regular file" in refused(*check, "--json", pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("good_writes", [0, 1])
def test_a_full_disk_loses_a_case_file_and_nothing_else(
    good_writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either nothing of a case can be written, or only what was not made smaller yet."""
    replace, writes = output._replace, []

    def fill(target: Path, data: bytes) -> None:
        writes.append(target)
        if target.parent.name == "servespec-cases" and len(writes) > good_writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(target, data)

    monkeypatch.setattr(output, "_replace", fill)
    result = servespec(
        "check", "--impl", FAULT, "--suite", "batch", "--suite", "scheduling", "--cases", 4,
        "--jobs", 1, "--shrink-seconds", 2, "--max-failures", 1, "--json", "report.json",
    )  # fmt: skip
    assert result.exit_code == 1, result.output
    assert "not written: cannot write" in result.stderr
    assert ("servespec replay" in result.stderr) is bool(good_writes)
    assert "does not agree: 1 failure" in result.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert [suite["name"] for suite in report["suites"]] == ["batch", "scheduling"]
    (failure,) = report["failures"]
    assert "No space left" in failure["not_written"]
    if good_writes:
        assert servespec("replay", failure["case_file"]).exit_code == 1
    else:
        assert failure["case_file"] is None


def test_a_report_that_cannot_be_written_does_not_take_the_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = output._replace

    def fill(target: Path, data: bytes) -> None:
        if target.suffix == ".json":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(target, data)

    monkeypatch.setattr(output, "_replace", fill)
    result = servespec(
        "check", "--suite", "batch", "--cases", 1, "--jobs", 1, "--json", "r.json", "--junit", "r.x"
    )
    assert result.exit_code == 2, result.output
    assert "servespec: cannot write r.json: No space left on device" in result.stderr
    assert "agrees with the reference" in result.stdout
    assert (tmp_path / "r.x").exists()


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf", "1e300", "1e400", "soon"])
def test_a_time_limit_is_a_time(seconds: str, tmp_path: Path) -> None:
    for command in (("check", "--suite", "batch", "--cases", 1), ("replay", "case.json")):
        line = refused(*command, "--time-limit", seconds)
        assert "--time-limit" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--shrink-seconds", "nan"],
        ["check", "--shrink-seconds", "-1"],
        ["check", "--no-such-option"],
        ["no-such-command"],
        ["replay"],
        ["matrix", "--python", sys.executable, "--steps", "0"],
        ["record", "--python", sys.executable, "--seeds", "0", "folder"],
        ["bench", "kernels", "--device", "foo"],
    ],
)
def test_a_wrong_call_is_one_line(arguments: list[str]) -> None:
    refused(*arguments)


def test_a_suite_named_twice_runs_once(tmp_path: Path) -> None:
    result = servespec(
        "check", "--suite", "batch", "--suite", "batch", "--cases", 1, "--jobs", 1, "--json", "r"
    )
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "r").read_text())
    assert [suite["name"] for suite in report["suites"]] == ["batch"]


def test_an_interpreter_without_vllm_is_seen_before_the_run(tmp_path: Path) -> None:
    """The interpreter that runs the tests has no vLLM; by name it is found on the search path."""
    for arguments in (
        ["matrix", "--python", sys.executable],
        ["record", "--python", sys.executable, "folder"],
        ["check", "--impl", "vllm", "--suite", "scheduling", "--python", sys.executable],
    ):
        assert "No module named 'vllm'" in refused(*arguments)
    assert "No module named" in refused("matrix", "--python", "python3")
    assert "no such file" in refused("matrix", "--python", "no-such-python")
    assert not list(tmp_path.iterdir())


def generate(*arguments: object, prompts: str = "1 2 3\n4 5\n") -> Result:
    Path("prompts").write_text(prompts)
    return servespec(
        "generate", "--model", "tiny", "--prompts", "prompts", "--max-tokens", 4, *arguments
    )


@pytest.mark.parametrize("option", ["max-num-seqs", "max-num-batched-tokens", "max-model-len"])
def test_limits_beyond_the_prompts_cost_no_memory(option: str) -> None:
    plain, large = generate(), generate(f"--{option}", 99_999_999_999)
    assert large.exit_code == 0, large.output
    assert large.stdout == plain.stdout


@pytest.mark.parametrize(
    ("arguments", "prompts", "text"),
    [
        (["--max-model-len", 0], "1\n", "max_model_len is 0"),
        (["--max-model-len", 3], "1\n1 2 3\n", "prompts prompts, line 2: 3 tokens: must be fewer"),
        (["--engine", "reference", "--dtype", "bfloat16"], "1\n", "dtype is bfloat16"),
        (["--seed", -1], "1\n", "--seed"),
        ([], "1\n2\n3 512\n", "prompts prompts, line 3: token 512"),
        (["--engine", "reference"], "1\n2\n3 512\n", "prompts prompts, line 3: token 512"),
        (["--max-tokens", 10**12], "1\n", "memory"),
        (["--blocks", 10**12], "1\n", "memory"),
    ],
)
def test_generate_names_what_is_wrong(arguments: list[object], prompts: str, text: str) -> None:
    result = generate(*arguments, prompts=prompts)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert text in line


def test_memory_that_there_is_not_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 745. GiB")

    monkeypatch.setattr("servespec.conformance.generate.generate", allocate)
    Path("prompts").write_text("1\n")
    line = refused("generate", "--model", "tiny", "--prompts", "prompts")
    assert line == "servespec: not enough memory: Unable to allocate 745. GiB"


def test_the_place_of_a_fault_is_folded_and_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    found = catalogue.FAULTS[0]
    monkeypatch.setattr(catalogue, "FAULTS", (found,))
    monkeypatch.setenv("COLUMNS", "50")
    result = servespec("faults")
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
    words = "".join("".join(line.split()) for line in result.stdout.splitlines())
    assert max(map(len, result.stdout.splitlines())) <= 50
    assert "num_scheduled" in words


@pytest.mark.parametrize("delay", [0.3, 0.8, 2.0])
def test_an_interrupt_is_130_from_the_start(delay: float, tmp_path: Path) -> None:
    # A shell lets what it starts in the background ignore interrupts, and so all that this starts.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from servespec.conformance.cli import main; print('ready', flush=True); main(['check',"
        " '--suite', 'engine', '--cases', '100000', '--jobs', '1'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "interrupted" in stdout + stderr


PROGRAM = """
import os
import sys

from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.conformance.adapters.server import serve


class Mine(ReferenceImplementation):
    name = "mine"


class Lazy(Mine):
    def make_scheduler(self, *configs):
        scheduler = super().make_scheduler(*configs)
        schedule, count = scheduler.schedule, iter(range(3))

        def lazy(*arguments):
            if next(count, None) is None:
                print("planted: out of steps", file=sys.stderr, flush=True)
                os._exit(7)
            return schedule(*arguments)

        scheduler.schedule = lazy
        return scheduler


{"mine": Mine, "lazy": Lazy}[sys.argv[1]].name = sys.argv[1]
serve({"mine": Mine, "lazy": Lazy}[sys.argv[1]]())
"""


def command(which: str, prefix: str = "process") -> str:
    Path("my program.py").write_text(PROGRAM)
    return f"{prefix}:{sys.executable} 'my program.py' {which}"


def test_a_program_is_checked_by_its_command() -> None:
    result = servespec(
        "check", "--impl", command("mine"), "--suite", "scheduling", "--suite", "cache",
        "--cases", 3, "--jobs", 2,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    result = servespec(
        "check", "--impl", command("mine", "process-v0"), "--suite", "scheduling-v0",
        "--cases", 3, "--jobs", 1,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    line = refused("check", "--impl", command("mine"), "--suite", "engine")
    assert "engine: no make_engine" in line


def test_a_program_that_fails_is_kept_and_replayed_only_when_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    lazy = command("lazy")
    result = servespec(
        "check", "--impl", lazy, "--suite", "scheduling", "--cases", 1, "--jobs", 1,
        "--shrink-seconds", 0, "--json", "report.json",
    )  # fmt: skip
    assert result.exit_code == 1, result.output
    (failure,) = json.loads((tmp_path / "report.json").read_text())["failures"]
    assert failure["verdict"] == "implementation failed"
    assert failure["last_lines"][-1] == "planted: out of steps"
    # A case file is an input like any other: it must not choose what is run.
    case = failure["case_file"]
    assert "give it as --impl" in refused("replay", case)
    assert "give it as --impl" in refused("shrink", case)
    # The command that is printed does name it, quoted for a shell.
    words = shlex.split(result.stderr.partition("  replay ")[2].partition("\n")[0])
    assert words[1:3] == ["replay", case]
    assert words[3:] == ["--impl", lazy]
    assert servespec(*words[1:]).exit_code == 1
    assert servespec("replay", case, "--impl", command("mine")).exit_code == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("process:", "no program"),
        ("process:'", "No closing quotation"),
        ("process:no-such-program", "no program 'no-such-program'"),
        (f"process:{sys.executable} -c 'raise SystemExit(3)'", "ended with exit status 3"),
        (f"process:{sys.executable} -c 'print(1)'", "no reply"),
    ],
)
def test_a_program_that_does_not_speak_is_refused_before_the_run(text: str, why: str) -> None:
    assert why in refused("check", "--impl", text, "--suite", "scheduling", "--cases", 1)


def test_bench_runs_on_one_thread_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    serve = engine_bench._serve

    def watch(*arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return serve(*arguments)

    monkeypatch.setattr(engine_bench, "_serve", watch)
    small = partial(engine_bench.bench_engine, requests=1, prompt_tokens=2, output_tokens=2)
    monkeypatch.setattr(engine_bench, "bench_engine", small)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        result = servespec("bench", "--rounds", 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert result.exit_code == 0, result.output
    assert seen == [1, 1]
    assert "one thread" in result.stdout
