"""The command: exit status, one line for bad input, reports, and cases that replay."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from click.testing import CliRunner, Result

from servespec.conformance.bench import engine as engine_bench
from servespec.conformance.cases import files
from servespec.conformance.cases.case import Case
from servespec.conformance.checks.registry import SUITES
from servespec.conformance.cli import main
from servespec.conformance.drawing import draw_cases
from servespec.conformance.faults import catalogue, self_test
from servespec.reference.models import checkpoint, tiny

FAULTS = "servespec.conformance.faults"


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def servespec(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], prog_name="servespec")


def refused(*arguments: object) -> str:
    """Call with bad input: exit status 2 and one line."""
    result = servespec(*arguments)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("servespec: ")
    assert "Traceback" not in line
    return line


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        ("one_token_too_few", "scheduler_output.num_scheduled_tokens"),
        ("state_of_another_request", "logits"),
        ("one_key_too_many", "logits"),
    ],
)
def test_a_planted_fault_is_found_shrunk_and_replayed(
    fault: str, place: str, tmp_path: Path
) -> None:
    result = servespec(
        "check", "--suite", "engine", "--impl", f"{FAULTS}:{fault}", "--jobs", 1,
        "--cases", 60, "--shrink-seconds", 100, "--max-failures", 1,
        "--json", "report.json", "--junit", "report.xml",
    )  # fmt: skip
    assert result.exit_code == 1, result.output
    assert "does not agree" in result.stdout
    for word in ("step", "expected", "got", "servespec replay"):
        assert word in result.stderr

    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] is False
    first = report["failures"][0]
    assert first["suite"] == "engine"
    assert first["field"].partition("[")[0] == place
    assert first["request"] is not None
    assert first["step"] is not None
    assert first["expected"] != first["got"]

    root = ET.fromstring((tmp_path / "report.xml").read_bytes())
    assert int(root[0].attrib["failures"]) == len(report["failures"])

    content = files.read(tmp_path / first["case_file"])
    assert content.implementation == f"{FAULTS}:{fault}"
    assert content.expected
    requests = content.case.workload.requests
    assert len(requests) <= 2, "not shrunk"
    assert sum(r.num_prompt_tokens for r in requests) <= 40

    again = servespec("replay", first["case_file"])
    assert again.exit_code == 1, again.output
    # Not which logit is worst: what a stale slot holds differs from run to run.
    assert f"step {first['step']}, request {first['request']}, {place}" in again.stdout
    if fault == "one_key_too_many":
        # What the fault breaks, the fast path has right.
        mended = servespec("replay", first["case_file"], "--impl", "fast")
        assert mended.exit_code == 0, mended.output
        assert "fast agrees" in mended.stdout


def test_a_run_that_agrees_says_so_in_every_form(tmp_path: Path) -> None:
    result = servespec(
        "check", "--suite", "scheduling", "--suite", "batch", "--cases", 5, "--jobs", 1,
        "--json", "report.json", "--junit", "report.xml",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "fast agrees with the reference" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "\x1b" not in result.output
    head = result.stdout.splitlines()[0].split()
    assert head == ["suite", "cases", "steps", "tokens", "equal", "ties", "diverged", "seconds"]

    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) >= {
        "spec_version", "implementation", "profile", "seed", "machine", "suites", "failures", "ok",
    }  # fmt: skip
    assert report["ok"] is True
    assert report["failures"] == []
    assert [suite["name"] for suite in report["suites"]] == ["scheduling", "batch"]
    for suite in report["suites"]:
        assert set(suite) >= {
            "name", "cases", "steps", "tokens", "equal", "ties", "diverged", "seconds", "counts",
        }  # fmt: skip
        assert suite["cases"] == 5
    root = ET.fromstring((tmp_path / "report.xml").read_bytes())
    assert [int(suite.attrib["failures"]) for suite in root] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.xml"]


@pytest.mark.parametrize(
    ("fault", "text"),
    [("hangs", "gave no answer within 2 seconds"), ("dies", "ended with exit status 7")],
)
def test_an_implementation_that_stops_answering_ends_no_run(
    fault: str, text: str, tmp_path: Path
) -> None:
    result = servespec(
        "check", "--suite", "engine", "--impl", f"{FAULTS}:{fault}", "--jobs", 1, "--cases", 2,
        "--shrink-seconds", 0, "--time-limit", 2 if fault == "hangs" else 60,
        "--json", "report.json",
    )  # fmt: skip
    assert result.exit_code == 1, result.output
    assert text in result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [failure["verdict"] for failure in report["failures"]] == ["implementation failed"] * 2
    assert report["suites"][0]["cases"] == 2
    if fault == "dies":
        assert "planted: about to die" in report["failures"][0]["last_lines"]
    for failure in report["failures"]:
        assert files.read(tmp_path / failure["case_file"]).divergence is not None


def test_an_implementation_without_a_factory_skips_suites(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from servespec.conformance.adapters.reference import ReferenceImplementation\n"
        "class Mine:\n"
        "    name = 'mine'\n"
        "    make_scheduler = ReferenceImplementation().make_scheduler\n"
    )
    result = servespec("check", "--impl", "mine:Mine", "--cases", 2, "--jobs", 1)
    assert result.exit_code == 0, result.output
    assert "engine left out: the implementation has no make_engine" in result.stdout
    assert "cannot run suite engine" in refused("check", "--impl", "mine:Mine", "--suite", "engine")


def test_what_an_implementation_prints_stays_out_of_the_way(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(
        "from servespec.conformance.adapters.reference import ReferenceImplementation\n"
        "print('on import')\n"
        "class Noisy(ReferenceImplementation):\n"
        "    def make_batch(self, config):\n"
        '        print(\'{"not": "a result"}\', flush=True)\n'
        "        return super().make_batch(config)\n"
    )
    result = servespec(
        "check", "--impl", "noisy:Noisy", "--suite", "batch", "--cases", 3, "--jobs", 1
    )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--suite", "engin"], "unknown suite 'engin': must be one of"),
        (["--impl", "slow"], "unknown implementation 'slow'"),
        (["--impl", "no_such_module:x"], "cannot import 'no_such_module'"),
        (["--impl", "json:nothing"], "has no 'nothing'"),
        (["--impl", "json:JSONDecoder"], "has none of make_scheduler"),
        (["--impl", "vllm"], "needs --python"),
        (["--impl", "vllm", "--python", "/no/such/python"], "no such file"),
        (["--impl", "broken:x"], "cannot import 'broken'"),
        (["--json", "."], "it is a folder"),
    ],
)
def test_check_refuses_what_it_cannot_run(arguments: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (:\n")
    assert text in refused("check", *arguments)


def drawn(suite: str) -> Case:
    found: list[Case] = []
    draw_cases(SUITES[suite].cases(), 3, 1, lambda case: bool(found.append(case)) or True)
    return found[-1]


def case_file(path: Path, drawn_from: str = "engine", /, **changes: object) -> Path:
    data = {"spec_version": "0.1", "implementation": "reference"}
    case = msgspec.to_builtins(drawn(drawn_from))
    for name, value in changes.items():
        *way, last = name.split("__")
        place = case
        for key in way:
            place = place[key]
        place[last] = value
    path.write_text(json.dumps({**data, "case": case}))
    return path


def test_replay_refuses_bad_case_files(tmp_path: Path) -> None:
    good = case_file(tmp_path / "good.json")
    cut = tmp_path / "cut.json"
    cut.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    before = cut.read_bytes()
    assert "cut.json: Input data was truncated" in refused("replay", cut)
    assert "cut.json: Input data was truncated" in refused("shrink", cut)
    assert cut.read_bytes() == before
    assert "No such file" in refused("replay", "none.json")
    bad = case_file(tmp_path / "bad.json", config__scheduler__max_num_seqs=0)
    assert "max_num_seqs is 0: must be at least 1" in refused("replay", bad)
    bad = case_file(tmp_path / "bad.json", suite="engin")
    assert "unknown suite 'engin'" in refused("replay", bad)
    request = {"request_id": "a", "prompt_token_ids": [1]}
    bad = case_file(tmp_path / "bad.json", workload__steps=[{"add": [request, request]}])
    assert "adds request 'a' 2 times" in refused("replay", bad)
    bad = case_file(
        tmp_path / "bad.json", workload__steps=[{"add": [{**request, "prompt_token_ids": []}]}]
    )
    assert "at least one token" in refused("replay", bad)


def test_what_only_the_reference_can_refuse_is_refused_too(tmp_path: Path) -> None:
    """A live duplicate and a missing model show only once the case runs."""
    request = {"request_id": "a", "prompt_token_ids": [1], "sampling_params": {"max_tokens": 5}}
    twice = [{"add": [request]}, {"add": [request]}]
    bad = case_file(tmp_path / "bad.json", "scheduling", workload__steps=twice)
    assert "DuplicateRequestError" in refused("replay", bad)
    assert "needs a model" in refused("replay", case_file(tmp_path / "bad.json", model=None))


def test_replay_of_a_case_that_agrees_has_nothing_to_shrink(tmp_path: Path) -> None:
    good = case_file(tmp_path / "good.json")
    result = servespec("replay", good)
    assert result.exit_code == 0, result.output
    assert "reference agrees" in result.stdout
    assert "nothing to shrink" in refused("shrink", good)


def test_implementations_are_listed() -> None:
    result = servespec("implementations")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()][:2] == ["fast", "reference"]


def test_faults_fails_if_one_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = catalogue.FAULTS[0]
    assert found.name == "one_token_too_few"
    monkeypatch.setattr(catalogue, "FAULTS", (found,))
    result = servespec("faults")
    assert result.exit_code == 0, result.output
    assert "scheduler_output.num_scheduled_tokens" in result.stdout
    unseen = replace(found, name="unseen", configuration=None, suites=("batch",))
    monkeypatch.setattr(catalogue, "FAULTS", (unseen,))
    monkeypatch.setattr(self_test, "FAULT_CASES", 2)
    result = servespec("faults")
    assert result.exit_code == 1
    assert "nothing  WRONG" in result.stdout


def test_bench_gives_figures_of_equal_tokens_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = partial(engine_bench.bench_engine, requests=2, prompt_tokens=4, output_tokens=3)
    monkeypatch.setattr(engine_bench, "bench_engine", small)
    result = servespec("bench", "--rounds", 2, "--json", "bench.json")
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == [
        "reference", "fast", "ratio",
    ]  # fmt: skip
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert figures["equal"] is True
    assert len(figures["fast"]) == len(figures["reference"]) == 2
    monkeypatch.setattr(
        engine_bench, "bench_engine", lambda **kwargs: replace(small(**kwargs), equal=False)
    )
    result = servespec("bench", "--rounds", 1)
    assert result.exit_code == 1
    assert not result.stdout


def test_generate_gives_the_same_from_both_engines(tmp_path: Path) -> None:
    model = tmp_path / "model"
    checkpoint.save(model, tiny.config(), tiny.weights(tiny.config(), 0))
    (tmp_path / "prompts").write_text("[1, 2, 3]\n7 8, 9\n5\n")
    outputs = {
        servespec(
            "generate", "--model", name, "--engine", engine, "--prompts", "prompts",
            "--max-tokens", 5, "--max-num-batched-tokens", budget,
        ).stdout
        for name, engine, budget in [
            ("tiny", "fast", 64), ("tiny", "reference", 2), (model, "fast", 3),
        ]
    }  # fmt: skip
    (output,) = outputs
    assert [len(json.loads(line)) for line in output.splitlines()] == [5, 5, 5]


def test_generate_refuses_bad_input(tmp_path: Path) -> None:
    model = tmp_path / "model"
    checkpoint.save(model, tiny.config(), tiny.weights(tiny.config(), 0))
    (tmp_path / "prompts").write_text("1 2 3\n")

    def generate(*arguments: object, prompts: str = "prompts") -> str:
        return refused("generate", "--prompts", prompts, *arguments)

    assert "no such folder" in generate("--model", "no-such-model")
    weights = next(model.glob("*.safetensors"))
    whole = weights.read_bytes()
    for data in (b"", whole[: len(whole) // 2], b"\xff" * 64):
        weights.write_bytes(data)
        for engine in ("fast", "reference"):
            assert weights.name in generate("--model", model, "--engine", engine)
    tiny_model = ("--model", "tiny")
    assert "max_model_len" in generate(*tiny_model, "--max-model-len", 3)
    assert "vocab_size" in generate(*tiny_model, prompts=written(tmp_path, "512\n"))
    assert "line 2: " in generate(*tiny_model, prompts=written(tmp_path, "1\n[]\n"))
    assert "line 1: " in generate(*tiny_model, prompts=written(tmp_path, "one two\n"))
    assert "line 1: " in generate(*tiny_model, prompts=written(tmp_path, "-4\n"))
    assert "no prompt" in generate(*tiny_model, prompts=written(tmp_path, ""))
    assert "No such file" in generate(*tiny_model, prompts="none")
    assert "max_num_seqs is 0" in generate(*tiny_model, "--max-num-seqs", 0)
    assert "num_gpu_blocks is 1" in generate(*tiny_model, "--blocks", 1)
    assert "block_size is 0" in generate(*tiny_model, "--block-size", 0)


def written(folder: Path, text: str) -> str:
    (folder / "other").write_text(text)
    return str(folder / "other")
