"""Simpler variants of steps of attention, the greatest leaps first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from servespec.conformance.cases.pieces import pieces
from servespec.conformance.workloads.workload_attention import (
    AttentionCase,
    AttentionRow,
    AttentionStep,
)

__all__ = ["attention_changes"]

Change = Callable[[AttentionCase], AttentionCase]


def attention_changes(case: AttentionCase, last: int | None) -> Iterator[Change]:
    """Yield changes that make a case simpler; some may be refused by its checks.

    Parameters
    ----------
    case : AttentionCase
    last : int or None
        The step that shows the failure: later ones are of no use.

    Yields
    ------
    callable
        From a case to a simpler one.
    """
    if last is not None:
        yield lambda case: replace(case, steps=case.steps[: last + 1])
        yield lambda case: replace(case, steps=case.steps[last : last + 1])
    for number, step in enumerate(case.steps):
        yield partial(_without_step, number=number)
        for piece in pieces(len(step.rows), len(step.rows) // 2):
            rows = step.rows[: piece.start] + step.rows[piece.stop :]
            yield partial(_with_step, number=number, fields={"rows": rows})
        yield partial(_with_step, number=number, fields={"num_dummy_rows": 0})
        yield partial(_with_step, number=number, fields={"num_padding_tokens": 0})
        for index in range(len(step.rows)):
            for shorter in (_no_context, _half_context, _one_token, _half_step, _one_fewer):
                yield partial(_with_row, number=number, index=index, change=shorter)
    config = case.config
    plain: tuple[dict[str, Any], ...] = (
        {"kernel_block_size": config.block_size},
        {"num_attention_heads": 1, "num_key_value_heads": 1},
        {"num_attention_heads": config.num_key_value_heads},
        {"head_dim": 8},
        {"head_dim": 32},
    )
    for fields in plain:
        yield partial(_with_config, fields=fields)
    yield lambda case: replace(case, query_scale=1.0)
    yield lambda case: replace(case, seed=0)


def _with_config(case: AttentionCase, fields: dict[str, Any]) -> AttentionCase:
    if fields.get("head_dim", 0) > case.config.head_dim:
        return case
    return replace(case, config=replace(case.config, **fields))


def _without_step(case: AttentionCase, number: int) -> AttentionCase:
    return replace(case, steps=case.steps[:number] + case.steps[number + 1 :])


def _with_step(case: AttentionCase, number: int, fields: dict[str, Any]) -> AttentionCase:
    steps = list(case.steps)
    steps[number] = replace(steps[number], **fields)
    return replace(case, steps=tuple(steps))


def _with_row(
    case: AttentionCase,
    number: int,
    index: int,
    change: Callable[[AttentionRow, int], AttentionRow],
) -> AttentionCase:
    step: AttentionStep = case.steps[number]
    row = change(step.rows[index], case.config.block_size)
    rows = (*step.rows[:index], row, *step.rows[index + 1 :])
    return _with_step(case, number, {"rows": rows})


def _no_context(row: AttentionRow, block_size: int) -> AttentionRow:
    """Keep the tokens of the step where they are, as the beginning of the sequence."""
    return _after(row, row.num_computed_tokens // block_size, block_size)


def _half_context(row: AttentionRow, block_size: int) -> AttentionRow:
    return _after(row, row.num_computed_tokens // block_size // 2, block_size)


def _after(row: AttentionRow, blocks: int, block_size: int) -> AttentionRow:
    return replace(
        row,
        num_computed_tokens=row.num_computed_tokens - blocks * block_size,
        block_ids=row.block_ids[blocks:],
    )


def _one_token(row: AttentionRow, block_size: int) -> AttentionRow:
    return replace(row, num_scheduled_tokens=1)


def _half_step(row: AttentionRow, block_size: int) -> AttentionRow:
    return replace(row, num_scheduled_tokens=-(-row.num_scheduled_tokens // 2))


def _one_fewer(row: AttentionRow, block_size: int) -> AttentionRow:
    return replace(row, num_scheduled_tokens=max(1, row.num_scheduled_tokens - 1))
