"""Case files: JSON that decodes straight into the contract types.

A case file comes from outside: it is limited in size, must hold known fields only, and the model
and cache it asks for are bounded before anything is allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from servespec.conformance.cases.case import Case, CaseFile
from servespec.conformance.output import write_atomically
from servespec.reference.contracts import ModelConfig

__all__ = ["CaseError", "read", "require_sensible", "write"]

MAX_FILE_BYTES = 32 * 2**20
MAX_PARAMETERS = 50_000_000
MAX_CACHE_VALUES = 100_000_000
MAX_REQUESTS = 10_000
MAX_STEPS = 100_000
MAX_ATTENTION_SCORES = 2**26


class CaseError(ValueError):
    """A case file cannot be used; the text names the file, the place in it and why."""


def write(path: Path, content: CaseFile) -> None:
    """Write a case file; a reader sees the old file or the whole new one.

    Parameters
    ----------
    path : Path
        Its folder is made if missing.
    content : CaseFile
    """
    write_atomically(path, msgspec.json.format(msgspec.json.encode(content), indent=1))


def read(path: Path) -> CaseFile:
    """Read a case file.

    Parameters
    ----------
    path : Path

    Returns
    -------
    CaseFile

    Raises
    ------
    CaseError
        If the file is missing, too long, cut, not a case, or asks for too much.
    """
    try:
        if not (path.is_file() or path.is_dir()) and path.exists():
            raise CaseError(f"case file {path}: no regular file")  # a pipe may never end
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise CaseError(f"case file {path}: {error.strerror or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise CaseError(f"case file {path}: longer than {MAX_FILE_BYTES} bytes")
    try:
        content = msgspec.json.decode(data, type=CaseFile)
        raw = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CaseError(f"case file {path}: {error}") from error
    if (unknown := _unknown_field(raw, msgspec.to_builtins(content), "$")) is not None:
        raise CaseError(f"case file {path}: unknown field {unknown}")
    try:
        require_sensible(content.case)
    except CaseError as error:
        raise CaseError(f"case file {path}: {error}") from error
    return content


def require_sensible(case: Case) -> None:
    """Refuse a case that asks for more than any test needs, or adds a request twice in a step.

    Integers must fit 32 bits, and seeds 64, so that every implementation can hold them.

    Parameters
    ----------
    case : Case

    Raises
    ------
    CaseError
    """
    _require_integers_that_fit(msgspec.to_builtins(case), "$.case", 31)
    cache, workload = case.config.cache, case.workload
    for number, step in enumerate(workload.steps):
        for name, count in Counter(request.request_id for request in step.add).items():
            if count > 1:
                raise CaseError(f"workload step {number} adds request {name!r} {count} times")
    _limit("workload.max_steps", workload.max_steps, MAX_STEPS)
    _limit("number of workload steps", len(workload.steps), MAX_STEPS)
    _limit("number of requests", len(workload.requests), MAX_REQUESTS)
    _limit("cache.num_gpu_blocks", cache.num_gpu_blocks, 2**20)
    _limit("cache.block_size", cache.block_size, 2**20)
    _limit("scheduler.max_model_len", case.config.scheduler.max_model_len, 2**24)
    _limit("scheduler.max_num_seqs", case.config.scheduler.max_num_seqs, 2**16)
    budget = case.config.scheduler.max_num_batched_tokens
    _limit("scheduler.max_num_batched_tokens", budget, 2**24)
    if case.config.speculative is not None:
        drafts = case.config.speculative.num_speculative_tokens
        _limit("speculative.num_speculative_tokens", drafts, 2**10)
    if case.v0 is not None:
        steps = case.v0.workload
        _limit("v0.workload.max_steps", steps.max_steps, MAX_STEPS)
        _limit("number of v0.workload steps", len(steps.steps), MAX_STEPS)
        _limit("number of v0.workload requests", len(steps.requests), MAX_REQUESTS)
        _limit("v0.cache.num_gpu_blocks", case.v0.cache.num_gpu_blocks, 2**20)
        _limit("v0.cache.num_cpu_blocks", case.v0.cache.num_cpu_blocks, 2**20)
        widest = max((request.best_of for request in steps.requests), default=1)
        _limit("best_of of a v0.workload request", widest, 2**10)
    if case.plans is not None:
        _limit("number of plans", len(case.plans), MAX_STEPS)
        for number, planned in enumerate(case.plans):
            _limit(
                f"tokens of plan {number}",
                sum(planned.output.num_scheduled_tokens.values()),
                case.config.scheduler.max_num_batched_tokens,
            )
    if case.attention is not None:
        layer, steps_of = case.attention.config, case.attention.steps
        pages = layer.num_blocks * layer.block_size
        values = 2 * pages * layer.num_key_value_heads * layer.head_dim
        _limit("values in the attention cache", values, MAX_CACHE_VALUES)
        scores = max(
            (
                row.num_scheduled_tokens * row.seq_len * layer.num_attention_heads
                for step in steps_of
                for row in step.rows
            ),
            default=0,
        )
        _limit("attention scores of a row", scores, MAX_ATTENTION_SCORES)
    if case.model is not None:
        model = case.model.config
        _limit("model parameters", _num_parameters(model), MAX_PARAMETERS)
        page = 2 * cache.block_size * model.num_key_value_heads * model.head_dim
        state = model.linear_num_value_heads * model.linear_value_head_dim * (
            model.linear_key_head_dim
        ) + model.conv_dim * (model.linear_conv_kernel_dim - 1)  # fmt: skip
        values = cache.num_gpu_blocks * max(page, state) * model.num_hidden_layers
        _limit("values in the cache", values, MAX_CACHE_VALUES)


def _require_integers_that_fit(value: object, path: str, bits: int) -> None:
    if isinstance(value, int):
        if not -(2**bits) <= value < 2**bits:
            text = str(value) if value.bit_length() < 256 else f"of {value.bit_length()} bits"
            raise CaseError(f"{path} is {text}: must be in [-2**{bits}, 2**{bits})")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            is_seed = str(key).endswith("seed")
            _require_integers_that_fit(inner, f"{path}.{key}", 63 if is_seed else bits)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, inner in enumerate(value):
            _require_integers_that_fit(inner, f"{path}[{index}]", bits)


def _limit(what: str, value: int, most: int) -> None:
    if value > most:
        raise CaseError(f"{what} is {value}: must be at most {most}")


def _num_parameters(model: ModelConfig) -> int:
    hidden = model.hidden_size
    heads = model.num_attention_heads + model.num_key_value_heads
    values = model.linear_num_value_heads * model.linear_value_head_dim
    full = 3 * heads * model.head_dim * hidden
    linear = (model.conv_dim + 3 * values + 2 * model.linear_num_value_heads) * hidden
    mlp = 3 * hidden * model.intermediate_size
    layers = sum(mlp + (full if kind == "full_attention" else linear) for kind in model.layer_types)
    return 2 * model.vocab_size * hidden + layers


def _unknown_field(raw: object, known: object, path: str) -> str | None:
    """Return the first key of `raw` that decoding dropped: a misspelt name must not pass."""
    if isinstance(raw, Mapping) and isinstance(known, Mapping):
        for key, value in raw.items():
            if key not in known:
                return f"{path}.{key}"
            if (found := _unknown_field(value, known[key], f"{path}.{key}")) is not None:
                return found
    elif isinstance(raw, Sequence) and isinstance(known, Sequence) and not isinstance(raw, str):
        for index, (a, b) in enumerate(zip(raw, known, strict=False)):
            if (found := _unknown_field(a, b, f"{path}[{index}]")) is not None:
                return found
    return None
