import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[2] / "data" / "ascend"


@pytest.fixture(scope="session")
def vectors() -> Callable[[str], list[dict[str, Any]]]:
    """Recorded inputs and outputs of the pinned vllm-ascend Python, one object a line."""

    def read(name: str) -> list[dict[str, Any]]:
        with gzip.open(DATA / f"{name}.jsonl.gz", "rt") as lines:
            return [json.loads(line) for line in lines]

    return read
