"""The README's examples run as they stand, and its tables name what exists."""

import re
from pathlib import Path

import pytest

from servespec.conformance.adapters.loading import FACTORIES
from servespec.conformance.checks.registry import SUITES
from servespec.conformance.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_is_one_for_each_package() -> None:
    assert [re.search(r"servespec\.(\w+)", text)[1] for text in EXAMPLES] == [  # type: ignore[index]
        "reference",
        "fast",
        "conformance",
    ]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number: int) -> None:
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(EXAMPLES[number], f"README.md example {number}", "exec"), names)
    test = names.get("test_my_engine")
    if callable(test):
        test()


def test_suites_factories_and_commands_are_named() -> None:
    for name in (*SUITES, *FACTORIES):
        assert f"`{name}" in README
    for name in main.commands:
        assert f"servespec {name}" in " ".join(README.split())
