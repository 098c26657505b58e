"""The comparison itself: what it finds, where, and what it calls rubbish."""

import signal
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
    CachedRequestData,
    NewRequestData,
    SamplingParams,
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
        "token_ids[3]: 3 (length 4) / nothing (length 3)"
    )
    assert difference(BATCH, replace(BATCH, token_ids=(7, 1, 2, 3, 4))) == (
        "token_ids[4]: nothing (length 4) / 4 (length 5)"
    )
    assert difference(BATCH, replace(BATCH, token_ids=(7, 1, 3))) == (
        "token_ids[2]: 2 (length 4) / 3 (length 3)"
    )


def test_long_values_that_differ_late_do_not_look_alike() -> None:
    tokens = tuple(range(100))
    assert difference(tokens, tokens[:-1]) == "[99]: 99 (length 100) / nothing (length 99)"
    names = dict.fromkeys([f"r{n:02}" for n in range(30)], 1)
    swapped = dict.fromkeys([*list(names)[:28], "r29", "r28"], 1)
    assert difference(
        SchedulerOutput(num_scheduled_tokens=names), SchedulerOutput(num_scheduled_tokens=swapped)
    ) == ("num_scheduled_tokens.order[28]: 'r28' / 'r29'")
    text = "x" * 200
    assert difference(text + "a" + text, text + "b" + text) == (
        f": 'a{'x' * 39}' from character 200 / 'b{'x' * 39}' from character 200"
    )
    assert difference(10**60 + 10**30, 10**60) == f": {10**60 + 10**30} / {10**60}"


@pytest.mark.parametrize(
    ("expected", "got", "text"),
    [
        ({9, 10, 1}, {1}, ": with {9, 10} (3 in all) / without {9, 10} (1 in all)"),
        (set(), {7}, ": without {7} (0 in all) / with {7} (1 in all)"),
        (
            {1, 2},
            frozenset({2, 30, 4}),
            ": with {1} and without {4, 30} (2 in all) / without {1} and with {4, 30} (3 in all)",
        ),
        (
            set(range(100)),
            set(),
            ": with {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 88 more} (100 in all)"
            " / without {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 88 more} (0 in all)",
        ),
        ({"b"}, {"a"}, ": with {'b'} and without {'a'} (1 in all)"
         " / without {'b'} and with {'a'} (1 in all)"),
    ],
)  # fmt: skip
def test_of_sets_only_what_differs_is_shown_in_order(
    expected: set[object], got: set[object], text: str
) -> None:
    assert difference(expected, got) == text


def test_an_empty_set_is_shown_as_one() -> None:
    assert shown(set()) == "set()"


PLAN = SchedulerOutput(
    num_scheduled_tokens={"a": 1, "b": 1, "c": 1},
    scheduled_new_reqs=(
        NewRequestData(
            req_id="c",
            prompt_token_ids=(1, 2),
            sampling_params=SamplingParams(),
            block_ids=((4,),),
            num_computed_tokens=0,
        ),
    ),
    scheduled_cached_reqs=CachedRequestData(
        req_ids=("a", "b"),
        new_block_ids=(None, ((7,),)),
        num_computed_tokens=(4, 5),
        num_output_tokens=(1, 1),
    ),
)


@pytest.mark.parametrize(
    ("got", "field", "request_id"),
    [
        (
            replace(PLAN, scheduled_cached_reqs=replace(
                PLAN.scheduled_cached_reqs, new_block_ids=(None, ((8,),)))),
            "scheduled_cached_reqs.new_block_ids[1][0][0]", "b",
        ),
        (
            replace(PLAN, scheduled_cached_reqs=replace(
                PLAN.scheduled_cached_reqs, num_computed_tokens=(3, 5))),
            "scheduled_cached_reqs.num_computed_tokens[0]", "a",
        ),
        (
            replace(PLAN, scheduled_new_reqs=(
                replace(PLAN.scheduled_new_reqs[0], block_ids=((4, 5),)),)),
            "scheduled_new_reqs[0].block_ids[0][1]", "c",
        ),
        (replace(PLAN, scheduled_new_reqs=()), "scheduled_new_reqs[0]", "c"),
    ],
)  # fmt: skip
def test_rows_of_a_plan_name_their_request(
    got: SchedulerOutput, field: str, request_id: str
) -> None:
    found = first_difference(PLAN, got)
    assert found is not None
    assert (found.field, found.request) == (field, request_id)


def test_nothing_is_no_answer_unless_it_may_be() -> None:
    with pytest.raises(ImplementationFailed, match="plan is None: must be of type SchedulerOutput"):
        expect_equal(PLAN, None, "plan")
    with pytest.raises(DivergedError):
        expect_equal(PLAN, None, "plan", optional=True)


def test_a_value_that_raises_when_compared_is_rubbish() -> None:
    class Unequal(int):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no opinion")

    got = replace(PLAN, total_num_scheduled_tokens=Unequal())
    with pytest.raises(ImplementationFailed, match="comparing plan raised RuntimeError: no opin"):
        expect_equal(PLAN, got, "plan")


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

    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def silent() -> None:
        raise SilentError

    for wrong in (silent, lambda: 1 / 0, lambda: next(generator()), lambda: [][1]):
        with pytest.raises(ImplementationFailed) as caught:
            attempt(wrong)
        assert "raised" in str(caught.value)
        assert caught.value.lines


def test_an_interrupt_is_a_person_or_where_none_can_be_the_implementation() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            attempt(interrupt)
        signal.signal(signal.SIGINT, lambda number, frame: None)
        with pytest.raises(ImplementationFailed, match="interrupt raised KeyboardInterrupt"):
            attempt(interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
