from random import Random

import pytest
import torch

from servespec.fast.batch.inputs import GdnInputs
from servespec.fast.batch.state_columns import spec_token_states
from servespec.reference.batch import state_columns
from servespec.reference.batch.gdn_metadata import gdn_metadata


@pytest.mark.parametrize("packed", [False, True])
def test_token_states_of_random_rows(packed):
    random = Random(3)
    left_out = elsewhere = 0
    for _ in range(300):
        num_spec = random.randint(1, 4)
        rows = random.randint(1, 6)
        query_lens = [random.randint(2, num_spec + 1) for _ in range(rows)]
        accepted = [random.randint(1, num_spec + 1) for _ in range(rows)]
        blocks = [[100 * row + column for column in range(num_spec + 1)] for row in range(rows)]
        metadata = gdn_metadata(
            query_lens,
            [20] * rows,
            [5] * rows,
            blocks,
            [query - 1 for query in query_lens],
            accepted,
        )
        expected = state_columns.spec_token_states(metadata, packed)
        inputs = GdnInputs(
            state_indices=torch.tensor(blocks)[:, 0],
            has_initial_state=torch.ones(rows, dtype=torch.bool),
            num_decodes=0,
            num_prefills=0,
            num_decode_tokens=0,
            num_prefill_tokens=0,
            num_spec_decodes=rows,
            num_spec_decode_tokens=sum(query_lens),
            spec_state_indices=torch.tensor(blocks, dtype=torch.int32),
            num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32),
            spec_query_start_loc=torch.tensor(metadata.spec_query_start_loc, dtype=torch.int32),
        )
        initial, written, runs = spec_token_states(inputs, packed)
        assert runs.tolist() == [states is not None for states in expected]
        at = 0
        for row, states in enumerate(expected):
            count = query_lens[row]
            if states is not None:
                assert int(initial[row]) == states.initial
                assert tuple(written[at : at + count].tolist()) == states.written
                elsewhere += states.initial // 100 != row
            else:
                left_out += 1
            at += count
    assert (left_out > 50) == packed
    assert (elsewhere > 50) == packed


def test_a_step_without_drafts_has_no_such_states():
    inputs = GdnInputs(
        state_indices=torch.tensor([1]),
        has_initial_state=torch.tensor([True]),
        num_decodes=1,
        num_prefills=0,
        num_decode_tokens=1,
        num_prefill_tokens=0,
    )
    with pytest.raises(ValueError, match="no row carries drafts"):
        spec_token_states(inputs)
