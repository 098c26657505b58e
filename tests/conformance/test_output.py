"""Writing files: links are followed, and only regular files are ever replaced."""

import os
from pathlib import Path

import pytest

from servespec.conformance import output
from servespec.conformance.output import OutputError, require_writable, unused, write_atomically


def test_a_link_stays_a_link_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "real.json", tmp_path / "link.json"
    link.symlink_to(target)
    for data in (b"new", b"replaced"):
        require_writable(link)
        write_atomically(link, data)
        assert link.is_symlink()
        assert target.read_bytes() == data
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["real.json"]


def test_what_is_no_regular_file_is_refused_and_stays(tmp_path: Path) -> None:
    pipe, loop = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    (tmp_path / "to-pipe").symlink_to(pipe)
    for path in (pipe, tmp_path / "to-pipe", loop):
        for write in (require_writable, lambda path: write_atomically(path, b"data")):
            with pytest.raises(OutputError, match="cannot write"):
                write(path)
    assert pipe.is_fifo()


def test_a_standard_stream_is_written_to_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe stands for the streams: code that is wrong must not replace a device."""
    stream = tmp_path / "stream"
    os.mkfifo(stream)
    monkeypatch.setattr(output, "_STREAMS", (str(stream),))
    reader = os.open(stream, os.O_RDONLY | os.O_NONBLOCK)
    try:
        require_writable(stream)
        write_atomically(stream, b"data")
        assert os.read(reader, 10) == b"data"
    finally:
        os.close(reader)
    assert stream.is_fifo()


def test_asking_leaves_nothing_behind(tmp_path: Path) -> None:
    require_writable(tmp_path / "a" / "b" / "report.json")
    assert not list(tmp_path.iterdir())
    (tmp_path / "old.json").write_text("old")
    require_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system without files")
def test_permission_that_no_file_system_honours_is_seen_before() -> None:
    """Permissions of /proc let the administrator write; the file system does not."""
    for path in ("/proc/servespec.json", "/proc/servespec/report.json"):
        with pytest.raises(OutputError, match=f"cannot write {path}: "):
            require_writable(Path(path))


def test_a_number_in_use_is_never_given_again(tmp_path: Path) -> None:
    for _ in range(3):
        unused(tmp_path, "engine").write_text("kept")
    (tmp_path / "engine-001.json").unlink()
    assert unused(tmp_path, "engine").name == "engine-001.json"
    (tmp_path / "engine-001.json").symlink_to(tmp_path / "missing")
    assert unused(tmp_path, "engine").name == "engine-003.json"
