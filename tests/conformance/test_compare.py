"""The comparison itself: what it finds, where, and what it calls rubbish."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from servespec.conformance.adapters.failure import ImplementationFailed
from servespec.conformance.compare import expect_equal, first_difference, shown
from servespec.conformance.verdicts import DivergedError, attempt
from servespec.reference.contracts import (
    AttentionState,
    BatchRecord,
    SchedulerOutput,
    SchedulerSnapshot,
)

BATCH = BatchRecord(
    req_ids=("a", "b"),
    swaps=(),
    num_scheduled_tokens=(1, 3),
    num_computed_tokens=(4, 0),
    token_ids=(7, 1, 2, 3),
    positions=(4, 0, 1, 2),
    query_start_loc=(0, 1, 4),
    seq_lens=(5, 3),
    block_tables=(((1,),), ((2,),)),
    logits_indices=(0, 3),
    sampled=(True, True),
    attn_state=AttentionState.CHUNKED_PREFILL,
    attention=(),
    gdn=(),
)


def difference(expected: object, got: object) -> str | None:
    found = first_difference(expected, got)
    return None if found is None else f"{found.field}: {found.expected} / {found.got}"


def test_equal_values_have_no_difference() -> None:
    assert difference(BATCH, replace(BATCH)) is None


def test_lists_and_numpy_scalars_pass_for_tuples_and_numbers() -> None:
    assert difference(BATCH, replace(BATCH, seq_lens=[np.int32(5), np.int64(3)])) is None


def test_the_first_field_in_order_is_named() -> None:
    got = replace(BATCH, positions=(4, 0, 1, 9), attn_state=AttentionState.DECODE_ONLY)
    assert difference(BATCH, got) == "positions[3]: 2 / 9"


def test_enums_are_named() -> None:
    got = replace(BATCH, attn_state=AttentionState.DECODE_ONLY)
    assert difference(BATCH, got) == "attn_state: CHUNKED_PREFILL / DECODE_ONLY"


def test_a_length_is_a_difference() -> None:
    assert difference(BATCH, replace(BATCH, token_ids=(7, 1, 2))) == (
        "token_ids: (7, 1, 2, 3) / (7, 1, 2)"
    )


def test_none_is_a_difference_both_ways() -> None:
    assert difference(None, 1) is not None
    assert difference(BATCH, None) is not None
    assert difference(None, None) is None


def test_order_counts_where_it_is_a_decision() -> None:
    def plan(*names: str) -> SchedulerOutput:
        return SchedulerOutput(num_scheduled_tokens=dict.fromkeys(names, 1))

    assert difference(plan("a", "b"), plan("a", "b")) is None
    assert difference(plan("a", "b"), plan("b", "a")) is not None


def test_of_a_plan_the_token_counts_come_first() -> None:
    got = SchedulerOutput(num_common_prefix_blocks=(1,), num_scheduled_tokens={"a": 2})
    wanted = SchedulerOutput(num_scheduled_tokens={"a": 3})
    assert difference(wanted, got) == "num_scheduled_tokens['a']: 3 / 2"


def test_order_does_not_count_in_a_snapshot() -> None:
    def state(*names: str) -> SchedulerSnapshot:
        counts = dict.fromkeys(names, 1)
        return SchedulerSnapshot(free_blocks=(), ref_counts=(), num_computed_tokens=counts)

    assert difference(state("a", "b"), state("b", "a")) is None


@pytest.mark.parametrize(
    ("got", "text"),
    [
        ({"a": 1}, "['b']: 2 / no entry"),
        ({"a": 1, "b": 2, "c": 3}, "['c']: no entry / 3"),
        ({"a": 1, "b": 5}, "['b']: 2 / 5"),
    ],
)
def test_mappings_differ_by_entry_and_name_the_request(got: dict[str, int], text: str) -> None:
    found = first_difference({"a": 1, "b": 2}, got)
    assert found is not None
    assert f"{found.field}: {found.expected} / {found.got}" == text
    assert found.request == text[2]


@pytest.mark.parametrize(
    "got",
    [
        "five",
        replace(BATCH, seq_lens="53"),
        replace(BATCH, seq_lens=(5, "3")),
        replace(BATCH, seq_lens=(5, 3.5)),
        replace(BATCH, seq_lens=np.array([5, 3])),
        replace(BATCH, attn_state="ChunkedPrefill"),
    ],
)
def test_values_of_another_type_are_rubbish(got: object) -> None:
    with pytest.raises(ImplementationFailed, match="must be of type"):
        first_difference(BATCH, got)


@pytest.mark.parametrize(
    ("field", "value", "request_id"),
    [("seq_lens", (5, 4), "b"), ("token_ids", (7, 1, 9, 3), "b"), ("positions", (9, 0, 1, 2), "a")],
)
def test_rows_and_tokens_name_their_request(field: str, value: object, request_id: str) -> None:
    with pytest.raises(DivergedError) as caught:
        expect_equal(BATCH, replace(BATCH, **{field: value}), "batch", step=3, batch=BATCH)
    assert caught.value.divergence.request == request_id
    assert caught.value.divergence.step == 3
    assert caught.value.divergence.place == f"batch.{field}"


def test_long_and_broken_values_are_shown_shortly() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert len(shown(tuple(range(10_000)))) < 200
    assert "Broken" in shown(Broken())


def test_whatever_an_implementation_raises_is_its_failure() -> None:
    def generator() -> Iterator[int]:
        raise SystemExit(3)
        yield 0

    for wrong in (lambda: 1 / 0, lambda: next(generator()), lambda: [][1]):
        with pytest.raises(ImplementationFailed) as caught:
            attempt(wrong)
        assert "raised" in str(caught.value)
        assert caught.value.lines
