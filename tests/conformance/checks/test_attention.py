"""Suite ``attention``: what its cases hold, what its bound allows, and what it notices."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from servespec.conformance.adapters.base import AnyArray, AttentionUnderTest
from servespec.conformance.adapters.fast import FastImplementation
from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.conformance.cases import files
from servespec.conformance.cases.case import Case
from servespec.conformance.cases.shrink import shrink
from servespec.conformance.checks.attention import SUITE, attention_bound, check
from servespec.conformance.faults import last_slot_of_a_page
from servespec.conformance.session import Options, run
from servespec.conformance.verdicts import Verdict, run_check
from servespec.conformance.workloads.workload_attention import (
    AttentionCase,
    AttentionConfig,
    AttentionRow,
    AttentionStep,
)
from servespec.reference.contracts import AttentionState, ConfigError
from servespec.reference.numerics.attention import attention


@pytest.fixture(scope="module")
def cases(drawn: Callable[..., list[Case]]) -> list[Case]:
    return drawn(SUITE.cases(), 150)


def test_everything_happens_and_both_sides_agree(cases: list[Case]) -> None:
    counts: Counter[str] = Counter()
    for case in cases:
        result = run_check(check, case, FastImplementation())
        assert result.divergence is None, result
        counts.update(result.counts, steps=result.steps, tokens=result.tokens)
    print(dict(counts))
    assert counts["tokens"] > 3000
    for happened in SUITE.must_reach:
        assert counts[happened] >= 10, happened


def test_the_reference_agrees_with_itself(cases: list[Case]) -> None:
    for case in cases[:30]:
        assert run_check(check, case, ReferenceImplementation()).verdict is Verdict.EQUAL


def in_float32(query, key, value, scale: float) -> AnyArray:
    """The equation as it stands, every operation in float32."""
    n, heads, _ = query.shape
    kv = len(key)
    key, value = (x.repeat(heads // key.shape[1], axis=1) for x in (key, value))
    scores = np.einsum("qhd,khd->hqk", query, key) * np.float32(scale)
    scores[:, np.arange(kv) > np.arange(kv - n, kv)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = np.einsum("hqk,khd->qhd", weights, value)
    assert out.dtype == np.float32
    return out


def test_the_bound_covers_every_order_of_summation_and_no_more() -> None:
    random = np.random.default_rng(0)
    for n, kv, heads, kv_heads, dim in ((1, 1, 1, 1, 8), (3, 40, 4, 2, 64), (30, 30, 6, 1, 32)):
        query, key, value = (
            random.standard_normal(shape).astype(np.float32)
            for shape in ((n, heads, dim), (kv, kv_heads, dim), (kv, kv_heads, dim))
        )
        scale = dim**-0.5
        exact = [array.astype(np.float64) for array in (query, key, value)]
        expected = attention(*exact, scale)
        bound = attention_bound(*exact, scale, "float32")
        for order in (slice(None), slice(None, None, -1)):
            got = in_float32(query[..., order], key[..., order], value, scale)
            assert (np.abs(got - expected) <= bound).all()
        one_key_fewer = attention(exact[0], exact[1][1:], exact[2][1:], scale) if kv > n else None
        if one_key_fewer is not None:
            assert (np.abs(one_key_fewer - expected) > bound).mean() > 0.9
        assert (bound < 2e-4).all()
        # One rounding of bfloat16 lies within its bound, and a step more does not.
        wide = attention_bound(*exact, scale, "bfloat16")
        mean = attention(exact[0], exact[1], np.abs(exact[2]), scale)
        assert (wide >= 2 * 2.0**-8 * mean).all()
        assert (wide <= 2.1 * 2.0**-8 * mean).all()


class Broken(FastImplementation):
    """The fast attention with one method replaced."""

    def __init__(self, **methods: object) -> None:
        super().__init__()
        self.methods = methods

    def make_attention(
        self,
        config: AttentionConfig,
        dtype: str = "float32",
        key_scale: AnyArray | None = None,
        value_scale: AnyArray | None = None,
    ) -> AttentionUnderTest:
        layer = super().make_attention(config, dtype, key_scale, value_scale)
        for name, method in self.methods.items():
            setattr(layer, name, method(layer, getattr(layer, name)))  # type: ignore[operator]
        return layer


def shifted_write(layer, write):
    def broken(key: AnyArray, value: AnyArray, slots: Sequence[int]) -> None:
        write(key, value, [slot ^ 1 if slot >= 0 else slot for slot in slots])

    return broken


def written_padding(layer, write):
    def broken(key: AnyArray, value: AnyArray, slots: Sequence[int]) -> None:
        write(key, value, [max(slot, 0) for slot in slots])

    return broken


def changed_by_reading(layer, attend):
    def broken(*arguments: object) -> AnyArray:
        out = attend(*arguments)
        key, value = layer.pages()
        layer.load(np.zeros_like(key), value)
        return out

    return broken


def scaled(factor: float):
    def change(layer, attend):
        return lambda *arguments: attend(*arguments) * np.float32(factor)

    return change


def answering(value: object):
    return lambda layer, method: lambda *arguments: value


@pytest.mark.parametrize(
    ("methods", "place"),
    [
        ({"write": shifted_write}, "key_pages"),
        ({"write": written_padding}, "key_pages"),
        ({"attend": changed_by_reading}, "key_pages"),
        ({"attend": scaled(1 + 2.0**-15)}, "output"),
        ({"attend": scaled(float("nan"))}, "output"),
        ({"attend_packed": scaled(1 + 2.0**-15)}, "packed_output"),
        ({"dequantized": lambda _, read: lambda *a: tuple(x * 2 for x in read(*a))}, "dequantized"),
    ],
)
def test_a_broken_operation_is_noticed(
    methods, place: str, cases: list[Case], first_failure
) -> None:
    _, result = first_failure(check, Broken(**methods), cases)
    assert result.verdict is Verdict.DIVERGED, result
    assert result.divergence is not None
    assert result.divergence.place.startswith(place)


def test_one_wrong_byte_of_int8_is_noticed(cases: list[Case], first_failure) -> None:
    def change(layer, pages):
        def broken() -> tuple[AnyArray, AnyArray]:
            key, value = pages()
            value[-1, -1, -1, -1] ^= 1
            return key, value

        return broken

    int8 = [c for c in cases if c.attention and c.attention.config.kv_cache_dtype == "int8"]
    _, result = first_failure(check, Broken(pages=change), int8)
    assert result.divergence is not None
    assert result.divergence.place == "value_pages"


def test_rounding_of_quantisation_is_noticed(
    cases: list[Case],
    monkeypatch: pytest.MonkeyPatch,
    first_failure,
) -> None:
    from servespec.fast.kernels import int8_kv

    def truncated(values, scale):
        return (values.to(scale.dtype) * scale.reciprocal()).trunc().clamp(-128, 127).char()

    monkeypatch.setattr(int8_kv, "quantize_int8", truncated)
    _, result = first_failure(check, FastImplementation(), cases)
    assert result.divergence is not None
    assert result.divergence.place == "key_pages"


@pytest.mark.parametrize("answer", [None, 7, "no", np.zeros(3), np.array(["a"])])
@pytest.mark.parametrize("method", ["attend", "attend_packed", "pages", "dequantized"])
def test_rubbish_is_a_failure_of_the_implementation(
    method: str,
    answer: object,
    cases: list[Case],
    first_failure,
) -> None:
    _, result = first_failure(check, Broken(**{method: answering(answer)}), cases)
    assert result.verdict is Verdict.FAILED, result


def test_a_missing_slot_is_found_shrunk_written_and_replayed(found_and_replayed) -> None:
    content, said = found_and_replayed("attention", "last_slot_of_a_page", 4)
    assert content.divergence is not None
    assert content.divergence.place == "output"
    assert "output[" in said
    assert run_check(check, content.case, FastImplementation()).verdict is Verdict.EQUAL


def test_a_failure_shrinks_to_one_row_of_one_full_page(cases: list[Case], first_failure) -> None:
    wide = [c for c in cases if c.attention and c.attention.config.block_size in (4, 6)]
    case, result = first_failure(check, last_slot_of_a_page, wide)
    small = shrink(case, result, lambda c: run_check(check, c, last_slot_of_a_page), seconds=20)
    given = small.case.attention
    assert given is not None
    (step,) = given.steps
    (row,) = step.rows
    assert row.seq_len <= given.config.block_size + 1
    assert (given.config.num_attention_heads, given.config.head_dim) == (1, 8)
    assert step.num_dummy_rows == step.num_padding_tokens == given.seed == 0


ROW = AttentionRow(num_computed_tokens=3, num_scheduled_tokens=2, block_ids=(1, 2))
STEP = AttentionStep(rows=(ROW,), attn_state=AttentionState.CHUNKED_PREFILL)
CONFIG = AttentionConfig(
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    block_size=4,
    num_blocks=3,
    kernel_block_size=2,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: replace(CONFIG, num_attention_heads=0), "a multiple of 1 K/V heads"),
        (lambda: replace(CONFIG, kernel_block_size=3), "a multiple of the kernel's 3"),
        (lambda: replace(CONFIG, kv_cache_dtype="int8"), "a multiple of 32 with INT8"),
        (lambda: replace(CONFIG, kv_cache_dtype="int8", head_dim=32), "block_size = 4 with INT8"),
        (lambda: replace(ROW, num_computed_tokens=10**9), r"must be in \[0, 4096\]"),
        (lambda: replace(ROW, num_scheduled_tokens=0), r"must be in \[1, 4096\]"),
        (lambda: replace(STEP, rows=()), r"rows is 0: must be in \[1, 1024\]"),
        (lambda: replace(STEP, num_dummy_rows=10**9), r"num_dummy_rows is 1000000000"),
        (
            lambda: AttentionCase(config=CONFIG, steps=(STEP,) * 65),
            "steps is 65: must be at most 64",
        ),
        (
            lambda: AttentionCase(
                config=CONFIG, steps=(replace(STEP, rows=(replace(ROW, block_ids=(1,)),)),)
            ),
            "at least 2 blocks",
        ),
        (
            lambda: AttentionCase(
                config=CONFIG, steps=(replace(STEP, rows=(replace(ROW, block_ids=(1, 3)),)),)
            ),
            r"must be in \[1, 3\)",
        ),
        (
            lambda: AttentionCase(config=CONFIG, steps=(replace(STEP, rows=(ROW, ROW)),)),
            "such that slot 7 is written once",
        ),
    ],
)
def test_bad_cases_are_named(change, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        change()


def test_a_case_that_asks_for_too_much_is_refused(cases: list[Case]) -> None:
    given = cases[0].attention
    assert given is not None
    vast = replace(given, config=replace(given.config, num_blocks=2**30))
    with pytest.raises(files.CaseError, match="values in the attention cache is"):
        files.require_sensible(replace(cases[0], attention=vast))
    row = AttentionRow(num_computed_tokens=0, num_scheduled_tokens=4096, block_ids=(1,))
    step = replace(STEP, rows=(row,))
    config = replace(
        CONFIG, num_attention_heads=64, block_size=4096, kernel_block_size=4096, num_blocks=2
    )
    long = AttentionCase(config=config, steps=(step,))
    with pytest.raises(files.CaseError, match="attention scores of a row is"):
        files.require_sensible(replace(cases[0], attention=long))


def test_an_implementation_without_the_factory_is_left_out(tmp_path: Path) -> None:
    module = tmp_path / "only_batches.py"
    module.write_text(
        "from servespec.conformance.adapters.reference import ReferenceImplementation\n"
        "class Only:\n"
        "    name = 'only batches'\n"
        "    make_batch = ReferenceImplementation().make_batch\n"
    )
    options = Options(
        implementation="only_batches:Only", cases=2, jobs=1, case_folder=tmp_path / "cases"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        report = run(options, Silent())
    assert report.ok
    assert [suite.name for suite in report.suites] == ["batch"]
    assert report.skipped["attention"] == "no make_attention"


class Silent:
    """A listener that says nothing."""

    def __getattr__(self, name: str):
        return lambda *arguments: None
