"""Token ids in, token ids out: `servespec generate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from servespec.conformance.adapters.base import Weights
from servespec.reference.contracts import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    Request,
    SamplingParams,
    SchedulerConfig,
    gdn_groups_first,
)

__all__ = ["PromptError", "generate", "read_prompts"]

MAX_FILE_BYTES = 64 * 2**20


class PromptError(ValueError):
    """A file of prompts cannot be used; the text names the file, the line and why."""


def read_prompts(path: Path) -> list[tuple[int, ...]]:
    """Read prompts, one a line: a JSON list of token ids, or ids between blanks or commas.

    Parameters
    ----------
    path : Path

    Returns
    -------
    list of tuple of int

    Raises
    ------
    PromptError
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PromptError(f"prompts {path}: {error.strerror or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise PromptError(f"prompts {path}: longer than {MAX_FILE_BYTES} bytes")
    prompts = []
    for number, line in enumerate(data.splitlines(), 1):
        text = line.strip()
        if not text.startswith(b"["):
            text = b"[" + b",".join(text.replace(b",", b" ").split()) + b"]"
        try:
            prompt = msgspec.json.decode(text, type=tuple[int, ...])
            Request(request_id=str(number), prompt_token_ids=prompt)
        except ValueError as error:
            raise PromptError(f"prompts {path}, line {number}: {error}") from error
        prompts.append(prompt)
    if not prompts:
        raise PromptError(f"prompts {path}: no prompt")
    return prompts


def generate(
    model: str,
    engine: Literal["fast", "reference"],
    prompts: Path,
    *,
    max_tokens: int,
    block_size: int,
    blocks: int | None,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int | None,
    dtype: str | None,
    seed: int,
) -> Sequence[Sequence[int]]:
    """Serve prompts greedily.

    Parameters
    ----------
    model : str
        A checkpoint folder, or ``tiny`` for the embedded model.
    engine : {"fast", "reference"}
    prompts : Path
        As for `read_prompts`.
    max_tokens : int
        New tokens of each prompt.
    block_size, max_num_batched_tokens, max_num_seqs : int
        As in `CacheConfig` and `SchedulerConfig`.
    blocks : int or None
        Blocks in the pool; None makes it large enough for the prompts that run together.
    max_model_len : int or None
        Most tokens of a request; None makes it long enough.
    dtype : {"float32", "bfloat16"} or None
        Of the fast engine, float32 if None; the reference has its own.
    seed : int
        Of the embedded model's weights.

    Returns
    -------
    sequence of sequence of int
        New tokens of each prompt.

    Raises
    ------
    ValueError
        If the model, the prompts or the limits are out of range.
    """
    if engine == "reference" and dtype is not None:
        raise ValueError(f"dtype is {dtype}: the reference computes in float64, leave it out")
    sampling = SamplingParams(max_tokens=max_tokens)
    token_ids = read_prompts(prompts)
    config, weights = _load(model, seed)
    # Limits beyond what the prompts can reach change no step; buffers are sized by them.
    needed = max(map(len, token_ids)) + max_tokens
    longest = needed if max_model_len is None else min(max_model_len, needed)
    together = min(max_num_seqs, len(token_ids))
    scheduler = SchedulerConfig(
        max_num_seqs=together,
        max_num_batched_tokens=min(max_num_batched_tokens, len(token_ids) * needed),
        max_model_len=longest,
    )
    _require_servable(prompts, token_ids, config.vocab_size, longest)
    groups = gdn_groups_first(config.layer_types)
    cache = CacheConfig(
        num_gpu_blocks=1 + together * len(groups) * -(-longest // max(1, block_size))
        if blocks is None
        else blocks,
        block_size=block_size,
        groups=groups,
    )
    engine_config = EngineConfig(scheduler=scheduler, cache=cache)
    if engine == "reference":
        from servespec.reference.engine import generate as run_reference
        from servespec.reference.models.qwen3_5 import from_weights

        return run_reference(from_weights(config, weights), engine_config, token_ids, sampling)
    from servespec.fast.engine import Engine

    engine_of_prompts = Engine(config, weights, engine_config, dtype or "float32")
    return engine_of_prompts.generate(token_ids, sampling)


def _require_servable(
    path: Path, prompts: Sequence[Sequence[int]], vocab_size: int, max_model_len: int
) -> None:
    """Name the line of a prompt that an engine would refuse."""
    for number, prompt in enumerate(prompts, 1):
        where = f"prompts {path}, line {number}"
        if max(prompt) >= vocab_size:
            raise PromptError(
                f"{where}: token {max(prompt)} is outside of the vocabulary: must be below"
                f" vocab_size {vocab_size}"
            )
        if len(prompt) >= max_model_len:
            raise PromptError(
                f"{where}: {len(prompt)} tokens: must be fewer than max_model_len {max_model_len}"
            )


def _load(model: str, seed: int) -> tuple[ModelConfig, Weights]:
    if model == "tiny":
        from servespec.reference.models import tiny

        config = tiny.config()
        return config, tiny.weights(config, seed)
    from servespec.reference.models import checkpoint

    return checkpoint.load(Path(model))
