import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def vectors() -> Callable[..., list[dict[str, Any]]]:
    """Recorded inputs and outputs of real engines, one object a line.

    Those under ascend come from the pinned vllm-ascend Python, those under vllm from vLLM 0.27.1.
    """

    def read(name: str, engine: str = "ascend") -> list[dict[str, Any]]:
        with gzip.open(DATA / engine / f"{name}.jsonl.gz", "rt") as lines:
            return [json.loads(line) for line in lines]

    return read
