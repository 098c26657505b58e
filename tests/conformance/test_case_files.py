"""Case files: what is written is read back, and nothing else is accepted."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from servespec.conformance.cases import files
from servespec.conformance.cases.case import SPEC_VERSION, Case, CaseFile
from servespec.conformance.cases.files import CaseError
from servespec.conformance.checks.registry import SUITES
from servespec.conformance.drawing import draw_cases
from servespec.conformance.output import OutputError, require_writable, write_atomically
from servespec.conformance.verdicts import Divergence, run_check


def cases(suite: str, count: int) -> list[Case]:
    drawn: list[Case] = []
    draw_cases(SUITES[suite].cases(), count, 1, lambda case: bool(drawn.append(case)) or True)
    return drawn


@pytest.fixture
def content() -> CaseFile:
    return CaseFile(
        spec_version=SPEC_VERSION,
        implementation="fast",
        case=cases("engine", 4)[-1],
        divergence=Divergence(field="batch.seq_lens[0]", expected="1", got="2", step=0),
    )


def changed(path: Path, content: CaseFile, **changes: Any) -> Path:
    """Write a case file with dotted fields replaced."""
    data = msgspec.to_builtins(content)
    for name, value in changes.items():
        *way, last = name.split("__")
        place = data
        for key in way:
            place = place[int(key) if key.isdigit() else key]
        place[last] = value
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("suite", sorted(SUITES))
def test_cases_of_every_suite_survive_a_round_trip(suite: str, tmp_path: Path) -> None:
    for number, case in enumerate(cases(suite, 5)):
        path = tmp_path / f"{number}.json"
        written = CaseFile(spec_version=SPEC_VERSION, implementation="x:y", case=case)
        files.write(path, written)
        assert files.read(path) == written


def test_expected_steps_survive_a_round_trip(tmp_path: Path) -> None:
    from servespec.conformance.adapters.reference import ReferenceImplementation

    case = cases("engine", 3)[-1]
    check = SUITES["engine"].check
    result = run_check(check, case, ReferenceImplementation(), keep_expected=True)
    assert result.expected
    assert result.divergence is None
    written = CaseFile(
        spec_version=SPEC_VERSION, implementation="x:y", case=case, expected=result.expected
    )
    files.write(tmp_path / "case.json", written)
    assert files.read(tmp_path / "case.json") == written


def test_every_cut_of_a_file_is_refused(content: CaseFile, tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    files.write(path, content)
    data = path.read_bytes()
    for size in [0, 1, len(data) // 3, len(data) // 2, len(data) - 2]:
        path.write_bytes(data[:size])
        with pytest.raises(CaseError, match=r"case\.json: "):
            files.read(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"case__config__scheduler__max_num_seqs": 0}, r"max_num_seqs is 0: must be at least 1"),
        ({"case__config__cache__block_size": "4"}, r"Expected `int`, got `str`.*block_size"),
        ({"case__config__cache__block_sise": 4}, r"unknown field \$\.case\.config\.cache\.block_s"),
        ({"case__workload__steps__0__add__0__prompt_token_ids": []}, "at least one token"),
        ({"case__workload__max_steps": 10**9}, "max_steps is 1000000000: must be at most"),
        ({"case__config__cache__num_gpu_blocks": 10**9}, "num_gpu_blocks is 1000000000"),
        ({"case__model__config__vocab_size": 10**9}, "model parameters is"),
        ({"case__dtype": "float8"}, "Invalid enum value 'float8'"),
        (
            {"case__workload__steps__0__add__0__prompt_token_ids": [1, 2**31]},
            r"\$\.case\.workload\.steps\[0\]\.add\[0\]\.prompt_token_ids\[1\] is 2147483648: "
            r"must be in \[-2\*\*31, 2\*\*31\)",
        ),
        (
            {"case__workload__steps__0__add__0__prompt_token_ids": [2**64]},
            r"prompt_token_ids\[0\] is 18446744073709551616: must be",
        ),
        (
            {"case__workload__steps__0__add__0__sampling_params__max_tokens": 10**19},
            r"max_tokens is 10000000000000000000: must be",
        ),
        ({"case__workload__steps__0__add__0__priority": -(10**400)}, r"is of 1329 bits: must be"),
        ({"case__workload__num_token_ids": 2**31}, r"num_token_ids is 2147483648: must be"),
        (
            {"case__config__speculative": {"method": "eagle", "num_speculative_tokens": 2**30}},
            r"num_speculative_tokens is 1073741824: must be at most",
        ),
        (
            {"case__config__scheduler__max_num_batched_tokens": 2**30},
            r"max_num_batched_tokens is 1073741824: must be at most",
        ),
        ({"case__workload__token_seed": 2**63}, r"token_seed is 9223372036854775808: must be"),
    ],
)
def test_bad_fields_are_named(
    content: CaseFile, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CaseError, match=message):
        files.read(changed(tmp_path / "case.json", content, **changes))


def test_a_request_that_arrives_twice_in_a_step_is_named(content: CaseFile, tmp_path: Path) -> None:
    request = msgspec.to_builtins(content.case.workload.requests[0])
    path = changed(
        tmp_path / "case.json", content, case__workload__steps=[{"add": [request, request]}]
    )
    with pytest.raises(CaseError, match=rf"adds request '{request['request_id']}' 2 times"):
        files.read(path)


def test_deep_and_long_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "case.json"
    path.write_text('{"spec_version": ' + "[" * 200_000)
    with pytest.raises(CaseError):
        files.read(path)
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 10)
    with pytest.raises(CaseError, match="longer than 10 bytes"):
        files.read(path)


def test_the_widest_integers_are_read(content: CaseFile, tmp_path: Path) -> None:
    widest = changed(
        tmp_path / "case.json",
        content,
        case__workload__token_seed=2**63 - 1,
        case__workload__steps__0__add__0__prompt_token_ids=[2**31 - 1],
    )
    assert files.read(widest).case.workload.token_seed == 2**63 - 1


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CaseError, match="pipe: no regular file"):
        files.read(tmp_path / "pipe")


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="No such file"):
        files.read(tmp_path / "none.json")
    with pytest.raises(CaseError, match="Is a directory"):
        files.read(tmp_path)


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    write_atomically(path, b"old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OutputError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_places_are_refused_before_the_work(tmp_path: Path) -> None:
    require_writable(tmp_path / "new" / "folder" / "file.json")
    with pytest.raises(OutputError, match="it is a folder"):
        require_writable(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="Not a directory"):
        require_writable(tmp_path / "file" / "report.json")
