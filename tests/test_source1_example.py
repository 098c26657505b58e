"""The example of source-1, step by step: budget 6, B decoding, A with a prompt of 12 tokens.

"A's 12-token prompt runs as 5 + 6 + 1": five tokens beside B's last decode, six alone because B
has ended, and one. (While B goes on decoding A gets 5 + 5 + 2, the second test.) Schedules, blocks
and metadata were derived by hand from the rules: the free queue starts as 1, 2, 3, ...; the GDN
groups take their blocks before attention does; blocks hold 4 tokens. Tokens are those transformers
chooses for each prompt by itself.
"""

import json

import numpy as np
import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from servespec.conformance.adapters.fast import FastImplementation
from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.reference.contracts import (
    AttentionMetadata,
    AttentionState,
    CacheConfig,
    EngineConfig,
    GdnMetadata,
    Request,
    SamplingParams,
    SchedulerConfig,
    gdn_groups_first,
)
from servespec.reference.models import tiny
from servespec.reference.models.hf_config import to_json

MODEL = tiny.config()
WEIGHTS = tiny.weights(MODEL, 0)  # six GDN layers in three groups, two of attention in one
A = tuple(range(100, 112))
B = (7, 8, 9, 10)
CONFIG = EngineConfig(
    scheduler=SchedulerConfig(max_num_batched_tokens=6, max_num_seqs=4, max_model_len=32),
    cache=CacheConfig(num_gpu_blocks=40, block_size=4, groups=gdn_groups_first(MODEL.layer_types)),
)


@pytest.fixture(scope="module")
def transformers_tokens():
    """Greedy tokens of a prompt, each from a full pass over the sequence."""
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**json.loads(to_json(MODEL, "float32")))).eval()
    model.load_state_dict({name: torch.tensor(value) for name, value in WEIGHTS.items()})

    def generate(prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            with torch.no_grad():
                logits = model(
                    input_ids=torch.tensor([tokens]),
                    attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                ).logits[0, -1]
            tokens.append(int(logits.argmax()))
        return tuple(tokens[len(prompt) :])

    return generate


@pytest.fixture(params=[ReferenceImplementation, FastImplementation], ids=["reference", "fast"])
def engine(request):
    return request.param().make_engine(MODEL, WEIGHTS, CONFIG)


def ask(request_id, prompt, max_tokens):
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens),
    )


def attention(lengths, seq_lens, tables, slots, state, *, decodes):
    starts = tuple(int(n) for n in np.cumsum((0, *lengths)))
    return AttentionMetadata(
        num_actual_tokens=starts[-1],
        num_decodes=decodes,
        num_prefills=len(lengths) - decodes,
        num_decode_tokens=decodes,
        query_start_loc=starts,
        actual_seq_lengths_q=starts[1:],
        seq_lens=seq_lens,
        max_query_len=max(lengths),
        block_tables=tables,
        slot_mapping=slots,
        attn_state=state,
    )


def gdn(lengths, states, *, decodes, has_initial_state):
    starts = tuple(int(n) for n in np.cumsum((0, *lengths)))
    return GdnMetadata(
        num_prefills=len(lengths) - decodes,
        num_prefill_tokens=starts[-1] - decodes,
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=starts[-1],
        has_initial_state=has_initial_state,
        non_spec_query_start_loc=starts,
        non_spec_state_indices=states,
    )


def test_a_runs_5_6_1_beside_b(engine, transformers_tokens):
    b_tokens = transformers_tokens(B, 2)
    a_tokens = transformers_tokens(A, 3)

    # B's prompt: the first four blocks, one for each group.
    engine.add_request(ask("B", B, max_tokens=2))
    record = engine.step()
    output, batch = record.scheduler_output, record.batch
    assert dict(output.num_scheduled_tokens) == {"B": 4}
    assert output.scheduled_new_reqs[0].block_ids == ((1,), (2,), (3,), (4,))
    assert batch.attn_state is AttentionState.PREFILL_NO_CACHE
    assert batch.attention == (
        attention(
            (4,), (4,), ((4,),), (16, 17, 18, 19), AttentionState.PREFILL_NO_CACHE, decodes=0
        ),
    )
    assert batch.gdn == tuple(
        gdn((4,), (state,), decodes=0, has_initial_state=(False,)) for state in (1, 2, 3)
    )
    assert record.sampled_token_ids == {"B": b_tokens[:1]}

    # A arrives. B goes first with one token, which needs a second block; A gets what is left, 5,
    # and blocks for 5 tokens only.
    engine.add_request(ask("A", A, max_tokens=3))
    record = engine.step()
    output, batch = record.scheduler_output, record.batch
    assert list(output.num_scheduled_tokens.items()) == [("B", 1), ("A", 5)]
    assert output.scheduled_cached_reqs.new_block_ids == (((), (), (), (5,)),)
    assert output.scheduled_new_reqs[0].block_ids == ((6,), (7,), (8,), (9, 10))
    assert batch.req_ids == ("B", "A")
    assert batch.swaps == ()
    assert batch.token_ids == (b_tokens[0], *A[:5])
    assert batch.positions == (4, 0, 1, 2, 3, 4)
    assert batch.query_start_loc == (0, 1, 6)
    assert batch.logits_indices == (0, 5)
    assert batch.sampled == (True, False)
    assert batch.attn_state is AttentionState.CHUNKED_PREFILL
    assert batch.attention == (
        attention(
            (1, 5),
            (5, 5),
            ((4, 5), (9, 10)),
            (20, 36, 37, 38, 39, 40),
            AttentionState.CHUNKED_PREFILL,
            decodes=1,
        ),
    )
    assert batch.gdn == tuple(
        gdn((1, 5), states, decodes=1, has_initial_state=(True, False))
        for states in ((1, 6), (2, 7), (3, 8))
    )
    assert record.sampled_token_ids == {"B": b_tokens[1:]}
    assert [(out.request_id, out.new_token_ids) for out in record.outputs if out.new_token_ids] == [
        ("B", b_tokens[1:])
    ]

    # B has ended; A has the whole budget.
    record = engine.step()
    output, batch = record.scheduler_output, record.batch
    assert dict(output.num_scheduled_tokens) == {"A": 6}
    assert output.finished_req_ids == {"B"}
    assert output.scheduled_cached_reqs.new_block_ids == (((), (), (), (11,)),)
    assert batch.req_ids == ("A",)
    assert batch.num_computed_tokens == (5,)
    assert batch.token_ids == A[5:11]
    assert batch.sampled == (False,)
    assert batch.attn_state is AttentionState.CHUNKED_PREFILL
    assert batch.attention == (
        attention(
            (6,),
            (11,),
            ((9, 10, 11),),
            (41, 42, 43, 44, 45, 46),
            AttentionState.CHUNKED_PREFILL,
            decodes=0,
        ),
    )
    assert batch.gdn == tuple(
        gdn((6,), (state,), decodes=0, has_initial_state=(True,)) for state in (6, 7, 8)
    )
    assert record.sampled_token_ids == {}

    # The last token of the prompt: a decode for the label and for attention, a prefill for GDN.
    record = engine.step()
    output, batch = record.scheduler_output, record.batch
    assert dict(output.num_scheduled_tokens) == {"A": 1}
    assert output.scheduled_cached_reqs.new_block_ids == (None,)
    assert batch.token_ids == A[11:]
    assert batch.sampled == (True,)
    assert batch.attn_state is AttentionState.DECODE_ONLY
    assert batch.attention == (
        attention((1,), (12,), ((9, 10, 11),), (47,), AttentionState.DECODE_ONLY, decodes=1),
    )
    assert batch.gdn == tuple(
        gdn((1,), (state,), decodes=0, has_initial_state=(True,)) for state in (6, 7, 8)
    )
    assert record.sampled_token_ids == {"A": a_tokens[:1]}

    # A decodes like any other request.
    record = engine.step()
    assert record.scheduler_output.scheduled_cached_reqs.new_block_ids == (((), (), (), (12,)),)
    assert record.batch.attn_state is AttentionState.DECODE_ONLY
    assert record.batch.attention[0].slot_mapping == (48,)
    assert record.batch.gdn == tuple(
        gdn((1,), (state,), decodes=1, has_initial_state=None) for state in (6, 7, 8)
    )
    assert record.sampled_token_ids == {"A": a_tokens[1:2]}
    record = engine.step()
    assert record.sampled_token_ids == {"A": a_tokens[2:]}
    assert not engine.has_unfinished_requests()


def test_a_runs_5_5_2_while_b_goes_on(engine, transformers_tokens):
    b_tokens = transformers_tokens(B, 6)
    a_tokens = transformers_tokens(A, 2)
    engine.add_request(ask("B", B, max_tokens=6))
    engine.step()
    engine.add_request(ask("A", A, max_tokens=2))
    expected = [
        ({"B": 1, "A": 5}, AttentionState.CHUNKED_PREFILL, {"B": b_tokens[1:2]}),
        ({"B": 1, "A": 5}, AttentionState.CHUNKED_PREFILL, {"B": b_tokens[2:3]}),
        (
            {"B": 1, "A": 2},
            AttentionState.CHUNKED_PREFILL,
            {"B": b_tokens[3:4], "A": a_tokens[:1]},
        ),
        ({"B": 1, "A": 1}, AttentionState.DECODE_ONLY, {"B": b_tokens[4:5], "A": a_tokens[1:]}),
        ({"B": 1}, AttentionState.DECODE_ONLY, {"B": b_tokens[5:]}),
    ]
    for scheduled, state, sampled in expected:
        record = engine.step()
        assert dict(record.scheduler_output.num_scheduled_tokens) == scheduled
        assert record.batch.req_ids == tuple(scheduled)
        assert record.batch.attn_state is state
        assert record.batch.attention[0].num_decodes == list(scheduled.values()).count(1)
        assert record.sampled_token_ids == sampled
    assert not engine.has_unfinished_requests()
