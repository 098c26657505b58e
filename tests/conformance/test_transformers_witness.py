"""transformers as a witness from outside: the embedded model as a checkpoint folder.

Logits may differ by what float32 rounds: the largest is about 8, where a rounding is 4.8e-7, and
the agreed bound of 2e-4 lets the model amplify one rounding 400 times; measured differences stay
below a third of it. Errors in the mathematics are larger by orders: scaling the embedding by 1.0002
or the rotary base by 1.01 already breaks the bound. Greedy tokens must be identical, and the
smallest margin between the best two tokens is above the bound.
"""

import os
from dataclasses import replace

import numpy as np
import pytest

from servespec.fast.engine import Engine
from servespec.reference import engine
from servespec.reference.batch.persistent import empty_batch
from servespec.reference.batch.prepare import prepare
from servespec.reference.cache.memory import initial_memory
from servespec.reference.contracts import (
    CacheConfig,
    EngineConfig,
    Request,
    SamplingParams,
    SchedulerConfig,
    gdn_groups_first,
)
from servespec.reference.models import checkpoint, tiny
from servespec.reference.models.qwen3_5 import forward, from_weights
from servespec.reference.scheduling import v1

LENGTHS = (1, 2, 3, 7, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 255, 300)
NEW = 32
BOUND = 2e-4
SAMPLING = SamplingParams(max_tokens=NEW)

random = np.random.default_rng(29)
PROMPTS = tuple(tuple(random.integers(0, 512, n).tolist()) for n in LENGTHS)


class Witness:
    """`Qwen3_5ForCausalLM` in float32; masks are always given, see below."""

    def __init__(self, folder):
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        from transformers import Qwen3_5ForCausalLM

        self.torch = torch
        self.model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def _run(self, tokens, total, **more):
        # Without a mask, generation code takes tokens equal to a pad token for padding.
        with self.torch.no_grad():
            return self.model(
                input_ids=self.torch.tensor([tokens]),
                attention_mask=self.torch.ones(1, total, dtype=self.torch.long),
                **more,
            )

    def logits(self, tokens):
        """Logits of every position in one pass, ``[tokens, vocab_size]``."""
        return self._run(list(tokens), len(tokens), use_cache=False).logits[0].numpy()

    def greedy(self, prompt, count):
        """Decode greedily with transformers' own cache."""
        tokens = []
        step = self._run(list(prompt), len(prompt), use_cache=True)
        for total in range(len(prompt) + 1, len(prompt) + 1 + count):
            tokens.append(int(step.logits[0, -1].argmax()))
            step = self._run(tokens[-1:], total, use_cache=True, cache=step.cache)
        return tuple(tokens)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("witness") / "tiny"
    config = tiny.config()
    checkpoint.save(path, config, tiny.weights(config, 0))
    return path


@pytest.fixture(scope="session")
def witness(folder):
    return Witness(folder)


@pytest.fixture(scope="session")
def witness_tokens(witness):
    return tuple(witness.greedy(prompt, NEW) for prompt in PROMPTS)


@pytest.fixture(scope="session")
def reference(folder):
    return from_weights(*checkpoint.load(folder))


def settings(max_num_batched_tokens):
    return EngineConfig(
        scheduler=SchedulerConfig(max_model_len=512, max_num_batched_tokens=max_num_batched_tokens),
        cache=CacheConfig(
            num_gpu_blocks=400, block_size=16, groups=gdn_groups_first(tiny.config().layer_types)
        ),
        keep_logits=True,
    )


def add_all(add, prompts):
    for index, prompt in enumerate(prompts):
        add(
            Request(
                request_id=str(index),
                prompt_token_ids=tuple(prompt),
                sampling_params=SAMPLING,
            )
        )


@pytest.fixture(scope="session")
def expected(witness, witness_tokens):
    """Logits of transformers at every position of each prompt with its new tokens."""
    return tuple(
        witness.logits((*prompt, *tokens[:-1]))
        for prompt, tokens in zip(PROMPTS, witness_tokens, strict=True)
    )


def test_the_witness_is_safe_to_follow(expected, witness_tokens):
    """Its own margins are far above the rounding, and its outputs vary."""
    smallest = np.inf
    for prompt, tokens, logits in zip(PROMPTS, witness_tokens, expected, strict=True):
        generated = logits[len(prompt) - 1 :]
        assert tuple(generated.argmax(axis=1)) == tokens, "transformers' cache agrees with itself"
        best = np.sort(generated, axis=1)
        smallest = min(smallest, float((best[:, -1] - best[:, -2]).min()))
    print(f"smallest top-2 margin of 512 greedy tokens: {smallest:.1e}")
    assert smallest > BOUND
    assert len({token for tokens in witness_tokens for token in tokens}) > 200


def test_reference_logits_of_whole_sequences(reference, expected, witness_tokens):
    """Every position of every sequence, all in one step: chunked delta rule, causal attention."""
    plan = settings(8192)
    worst = 0.0
    for prompt, tokens, logits in zip(PROMPTS, witness_tokens, expected, strict=True):
        sequence = (*prompt, *tokens[:-1])
        scheduler = v1.initial_state(plan.scheduler, plan.cache)
        scheduler = v1.add_request(scheduler, Request(request_id="a", prompt_token_ids=sequence))
        _, output = v1.schedule(scheduler)
        _, record = prepare(empty_batch(), output, plan)
        record = replace(record, logits_indices=tuple(range(len(sequence))))
        memory = initial_memory(plan.cache.groups, plan.cache.block_size)
        ours, _ = forward(reference, record, plan.cache.groups, memory)
        worst = max(worst, float(np.abs(ours - logits).max()))
    print(f"{sum(map(len, expected))} positions, largest difference {worst:.1e}")
    assert worst <= BOUND


@pytest.mark.parametrize("budget", [64, 1024])
def test_reference_engine(reference, expected, witness_tokens, budget):
    """All prompts together, prefilled in chunks beside decodes: the same tokens and logits."""
    state = engine.initial_state(reference, settings(budget))

    def add(request):
        nonlocal state
        state = engine.add_request(state, request)

    add_all(add, PROMPTS)
    tokens = [()] * len(PROMPTS)
    worst, mixed = 0.0, 0
    while engine.has_unfinished_requests(state):
        state, record = engine.step(state)
        mixed += 1 in record.batch.num_scheduled_tokens and (
            max(record.batch.num_scheduled_tokens) > 1
        )
        for row, request_id in enumerate(record.batch.req_ids):
            position = record.batch.seq_lens[row] - 1
            difference = np.abs(record.logits[row] - expected[int(request_id)][position]).max()
            worst = max(worst, float(difference))
        for output in record.outputs:
            tokens[int(output.request_id)] += output.new_token_ids
    print(f"budget {budget}: {mixed} mixed steps, largest difference {worst:.1e}")
    assert tuple(tokens) == witness_tokens
    assert worst <= BOUND
    assert mixed > 0


@pytest.mark.parametrize("budget", [64, 1024])
def test_fast_engine(folder, expected, witness_tokens, budget):
    """The fast engine in float32: the same tokens; both sides round, hence twice the bound."""
    fast = Engine.from_checkpoint(folder, settings(budget))
    add_all(fast.add_request, PROMPTS)
    tokens = [()] * len(PROMPTS)
    worst = 0.0
    while fast.has_unfinished_requests():
        record = fast.step()
        for row, request_id in enumerate(record.batch.req_ids):
            position = record.batch.seq_lens[row] - 1
            difference = np.abs(record.logits[row] - expected[int(request_id)][position]).max()
            worst = max(worst, float(difference))
        for output in record.outputs:
            tokens[int(output.request_id)] += output.new_token_ids
    print(f"budget {budget}: largest difference {worst:.1e}")
    assert tuple(tokens) == witness_tokens
    assert worst <= 2 * BOUND
