"""INT8 K/V against the pinned Python, and how far a prompt's numbers depend on its company."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from servespec.reference.batch.metadata import attention_metadata
from servespec.reference.contracts import AttentionState, ConfigError
from servespec.reference.numerics.bfloat16 import round_bfloat16
from servespec.reference.numerics.int8_kv import (
    Int8Pages,
    dequantize,
    gather_rows,
    int8_attention,
    int8_scales,
    quantize,
    rows_kept_float,
    write_tokens,
)
from servespec.reference.numerics.layouts import nz_pages

HEADS, DIM, BLOCK = 2, 64, 32


def test_recorded_tensors_bit_for_bit(vectors):
    recorded = vectors("int8_kv")
    assert len(recorded) == 20
    saturated = 0
    for line in recorded:
        sizes = line["num_kv_heads"], line["head_dim"]
        scales = int8_scales(line["key_scale"], line["value_scale"], *sizes)
        for name, scale in (("key", scales.key), ("value", scales.value)):
            integers = quantize(line[name], scale)
            assert integers.tolist() == line[f"{name}_int8"]
            saturated += int(np.isin(integers, (-128, 127)).sum())
            # A bfloat16 has 8 significant bits, so each of its three roundings (of the inverse, of
            # the quotient, of the result) costs up to one part in 256; a fourth covers their
            # products. The integer costs half a step, rounded with the result.
            values = np.array(line[name])
            inside = np.abs(values) < 126 * scale
            error = np.abs(dequantize(integers, scale) - values)
            bound = scale / 2 * (1 + 1 / 256) + 4 * np.abs(values) / 256
            assert (error <= bound)[inside].all()
    assert saturated > 100


def test_rounding_to_bfloat16_is_that_of_torch():
    random = np.random.default_rng(2)
    values = np.concatenate(
        [
            random.standard_normal(20000).astype(np.float32),
            np.float32([0.0, -0.0, 1.00390625, 1.01171875, -1.00390625, 3.3e38]),
        ]
    )
    expected = torch.from_numpy(values).to(torch.bfloat16).double().numpy()
    assert np.array_equal(round_bfloat16(values), expected)


def test_halves_round_to_even():
    scale = np.full((1, 32), 1.0)
    values = np.tile([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.0, -129.0], 4).reshape(1, 1, 32)
    assert quantize(values, scale)[0, 0, :8].tolist() == [0, 2, 2, 0, -2, 126, 127, -128]


def test_a_token_written_to_a_slot_lies_where_the_fractal_layout_has_it():
    pages = np.zeros((3, BLOCK, HEADS, DIM), np.int8)
    token = np.arange(HEADS * DIM, dtype=np.int8).reshape(1, HEADS, DIM)
    written = write_tokens(pages, (2 * BLOCK + 5, -1), np.concatenate([token, token + 1]))
    assert not pages.any()
    memory = written.reshape(-1)
    for head in range(HEADS):
        for channel in range(DIM):
            at = (((2 * HEADS + head) * 2 + channel // 32) * BLOCK + 5) * 32 + channel % 32
            assert memory[at] == token[0, head, channel]
    assert np.count_nonzero(memory) == np.count_nonzero(token)
    (read,) = gather_rows(written, ((1, 2),), (BLOCK + 6,))
    assert np.array_equal(read[BLOCK + 5], token[0])
    with pytest.raises(ValueError, match="head_dim is 48"):
        nz_pages(np.zeros((1, 32, 2, 48), np.int8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_offset": [1.0]}, "key_offset is 1.0: must be 0"),
        ({"value_offset": np.full(HEADS * DIM, -2.0)}, "value_offset is 2.0: must be 0"),
        ({"key_scale": [0.1]}, "key_scale is 'of 1 values': must be one value a channel"),
        ({"value_scale": np.zeros(HEADS * DIM)}, "value_scale is 0.0: must be positive"),
    ],
)
def test_scales_that_would_be_lost_are_refused(change, message):
    ones = np.ones(HEADS * DIM)
    fields = {"key_scale": ones, "value_scale": ones, **change}
    with pytest.raises(ConfigError, match=message):
        int8_scales(num_kv_heads=HEADS, head_dim=DIM, **fields)


class Step:
    """Rows of a step over one cache: (tokens before, tokens now) each, decodes first."""

    def __init__(self, seed, rows, state, num_spec=0):
        random = np.random.default_rng(seed)
        self.scales = int8_scales(
            random.uniform(0.02, 0.08, HEADS * DIM),
            random.uniform(0.02, 0.08, HEADS * DIM),
            HEADS,
            DIM,
        )
        pages = np.zeros((2, 1 + 2 * len(rows), BLOCK, HEADS, DIM), np.int8)
        tables, slots, packed = [], [], []
        for row, (before, count) in enumerate(rows):
            table = (1 + 2 * row, 2 + 2 * row)
            tables.append(table)
            # A row's tokens depend on its lengths alone, so that it is the same in any company.
            mine = np.random.default_rng(100 * before + count)
            tokens = round_bfloat16(mine.standard_normal((before + count, 4 + 2 * HEADS, DIM)))
            where = [
                table[position // BLOCK] * BLOCK + position % BLOCK
                for position in range(before + count)
            ]
            key, value = tokens[:, 4 : 4 + HEADS], tokens[:, 4 + HEADS :]
            pages = np.stack(
                [
                    write_tokens(pages[0], where, quantize(key, self.scales.key)),
                    write_tokens(pages[1], where, quantize(value, self.scales.value)),
                ]
            )
            slots += where[before:]
            packed.append(tokens[before:])
        tokens = np.concatenate(packed)
        self.query, self.key, self.value = np.split(tokens, (4, 4 + HEADS), axis=1)
        self.pages = Int8Pages(key=pages[0], value=pages[1])
        self.metadata = attention_metadata(
            np.concatenate([[0], np.cumsum([count for _, count in rows])]).tolist(),
            [before + count for before, count in rows],
            tables,
            slots,
            num_spec,
            state,
        )

    def attend(self, profile):
        out = int8_attention(
            self.query,
            self.key,
            self.value,
            self.pages,
            self.metadata,
            self.scales,
            DIM**-0.5,
            profile,
        )
        starts = self.metadata.query_start_loc
        return [out[start:end] for start, end in pairwise(starts)]


def test_a_prompt_in_two_companies():
    """The same new prompt beside a new one, and beside a chunk that continues another."""
    state = AttentionState.CHUNKED_PREFILL
    decode, prompt = (20, 1), (0, 9)
    beside_new = Step(1, (decode, prompt, (0, 5)), state)
    beside_old = Step(1, (decode, prompt, (7, 5)), state)
    assert rows_kept_float(beside_new.metadata, "pinned") == (False, True, True)
    assert rows_kept_float(beside_old.metadata, "pinned") == (False, False, False)
    pinned = [step.attend("pinned") for step in (beside_new, beside_old)]
    invariant = [step.attend("invariant") for step in (beside_new, beside_old)]
    # Decodes read back in any case. Of the prompt, values alone move by up to half a step.
    assert np.array_equal(pinned[0][0], pinned[1][0])
    difference = np.abs(pinned[0][1] - pinned[1][1]).max()
    print(f"pinned: largest difference of the prompt {difference:.4f}; invariant: 0")
    assert 0.005 < difference < 0.5
    assert np.array_equal(invariant[0][1], invariant[1][1])
    assert np.array_equal(invariant[0][0], pinned[0][0])


def test_states_choose_what_is_read():
    rows = ((0, 4), (0, 6))
    new = Step(2, rows, AttentionState.PREFILL_NO_CACHE)
    assert rows_kept_float(new.metadata, "pinned") == (True, True)
    for state in (AttentionState.PREFILL_CACHE_HIT, AttentionState.SPEC_DECODING):
        read_back = Step(2, rows, state)
        assert rows_kept_float(read_back.metadata, "pinned") == (False, False)
    assert np.array_equal(read_back.attend("pinned")[1], new.attend("invariant")[1])
    assert not np.array_equal(new.attend("pinned")[1], new.attend("invariant")[1])


def test_a_mixed_step_with_verification_rows_is_ill_formed():
    step = Step(3, ((20, 3), (0, 9)), AttentionState.CHUNKED_PREFILL, num_spec=2)
    with pytest.raises(ValueError, match="num_decode_tokens is 3: must be num_decodes = 1"):
        step.attend("pinned")
    assert len(step.attend("invariant")) == 2


def test_arguments_stay_as_they_were():
    random = np.random.default_rng(4)
    values = random.standard_normal((3, HEADS, DIM))
    scale = random.uniform(0.02, 0.08, (HEADS, DIM))
    pages = random.integers(-9, 9, (2, BLOCK, HEADS, DIM)).astype(np.int8)
    integers = random.integers(-9, 9, (3, HEADS, DIM)).astype(np.int8)
    given = values, scale, pages, integers
    before = [array.copy() for array in given]
    results = [
        round_bfloat16(values),
        quantize(values, scale),
        dequantize(integers, scale),
        write_tokens(pages, (1, 2, 40), integers),
        *(array for array in int8_scales(scale, scale, HEADS, DIM).__getstate__()),
    ]
    gather_rows(pages, ((1, 0),), (40,))
    step = Step(5, ((20, 1), (0, 9)), AttentionState.CHUNKED_PREFILL)
    held = [step.query, step.key, step.value, step.pages.key, step.pages.value]
    copies = [array.copy() for array in held]
    results.append(np.concatenate(step.attend("pinned")))
    assert all(map(np.array_equal, given, before))
    assert all(map(np.array_equal, held, copies))
    assert not any(array.flags.writeable for array in results[:-1])
