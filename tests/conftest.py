import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"

RENAMED = {
    "spec_state_indices_tensor": "spec_state_indices",
    "non_spec_state_indices_tensor": "non_spec_state_indices",
    "spec_token_indx": "spec_token_index",
    "non_spec_token_indx": "non_spec_token_index",
}


def in_our_terms(line: dict[str, Any]) -> dict[str, Any]:
    expected = line.get("expect")
    if isinstance(expected, dict):
        line["expect"] = {RENAMED.get(key, key): tupled(value) for key, value in expected.items()}
    return line


def tupled(value: Any) -> Any:
    return tuple(tupled(item) for item in value) if isinstance(value, list) else value


@pytest.fixture(scope="session")
def vectors() -> Callable[..., list[dict[str, Any]]]:
    """Recorded inputs and outputs of real engines, one object a line.

    Those under ascend come from the pinned vllm-ascend Python, those under vllm from vLLM 0.27.1.
    What is expected of metadata gets our names and tuples for lists.
    """

    def read(name: str, engine: str = "ascend") -> list[dict[str, Any]]:
        with gzip.open(DATA / engine / f"{name}.jsonl.gz", "rt") as lines:
            return [in_our_terms(json.loads(line)) for line in lines]

    return read
