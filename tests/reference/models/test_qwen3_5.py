"""The model on plans written by hand: whatever the batch, the logits of a request are the same.

Bound between runs in float64: the measured amplification of a rounding error through the tiny
model is below 3e3 (float32 runs of transformers differ by 3e-5 with eps = 1.2e-7), sums are at
most 128 long; 1e3 * 128 * eps = 3e-11 for logits around 8.
"""

from dataclasses import replace

import numpy as np
import pytest

from servespec.reference.cache.memory import MemoryAccessError
from servespec.reference.contracts import ConfigError, Quirks
from servespec.reference.models import qwen3_5, tiny
from servespec.reference.models.qwen3_5 import from_weights

BOUND = 3e-11
random = np.random.default_rng(7)
PROMPT = random.integers(0, 512, 70).tolist()
OTHER = random.integers(0, 512, 33).tolist()


@pytest.fixture(scope="module")
def alone(driver, model):
    """The prompt in one step, then 12 decodes: logits of each position sampled."""
    run = driver(model)
    logits = [run.step({"a": 70}, {"a": PROMPT})["a"][-1]]
    logits += [run.step({"a": 1})["a"][-1] for _ in range(12)]
    return np.array(logits), run.tokens["a"]


def test_outputs_vary(alone):
    _, tokens = alone
    assert len(set(tokens[70:])) > 8


@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 17, 63, 64, 65, 69])
def test_chunk_boundaries_do_not_matter(driver, model, alone, chunk):
    run = driver(model)
    prompts = {"a": PROMPT}
    for start in range(0, 70, chunk):
        last = run.step({"a": min(chunk, 70 - start)}, prompts)
        prompts = None
    logits = [last["a"][-1]] + [run.step({"a": 1})["a"][-1] for _ in range(12)]
    assert np.abs(np.array(logits) - alone[0]).max() < BOUND
    assert run.tokens["a"] == alone[1]


def test_batch_mates_do_not_matter(driver, model, alone):
    run = driver(model)
    run.step({"b": 33}, {"b": OTHER})
    run.step({"b": 1, "a": 40}, {"a": PROMPT})
    run.step({"b": 1, "a": 29, "c": 20}, {"c": OTHER})
    logits = [run.step({"a": 1, "b": 1, "c": 10})["a"][-1]]
    logits += [run.step({"c": 1, "a": 1})["a"][-1] for _ in range(12)]
    assert np.abs(np.array(logits) - alone[0]).max() < BOUND
    assert run.tokens["a"] == alone[1]
    # The same prompt at another time in another row: the same tokens as far as both went.
    common = min(len(run.tokens["b"]), len(run.tokens["c"]))
    assert run.tokens["b"][:common] == run.tokens["c"][:common]


@pytest.mark.parametrize(("block_size", "kernel"), [(1, None), (5, None), (64, None), (32, 8)])
def test_block_sizes_do_not_matter(driver, model, alone, block_size, kernel):
    run = driver(model, block_size, kernel)
    logits = [run.step({"a": 70}, {"a": PROMPT})["a"][-1]]
    logits += [run.step({"a": 1})["a"][-1] for _ in range(12)]
    assert np.abs(np.array(logits) - alone[0]).max() < BOUND


@pytest.mark.parametrize("quirk", [False, True])
def test_a_fresh_one_token_prompt_beside_a_decode_starts_from_zeros(driver, model, quirk):
    """Also where the metadata call it a decode, which has a state, as vLLM 0.27.1 does."""
    first = driver(model).step({"x": 1}, {"x": [5]})["x"]
    run = driver(model, quirks=Quirks(gdn_fresh_decode=quirk))
    run.step({"b": 33}, {"b": OTHER})
    second = run.step({"b": 1, "x": 1}, {"x": [5]})["x"]
    assert run.record.gdn[0].num_decodes == (2 if quirk else 1)
    assert np.abs(first - second).max() < BOUND


def test_decodes_run_recurrently_and_prefills_in_chunks(driver, model, monkeypatch):
    seen = []
    for name in ("recurrent_gated_delta_rule", "chunked_gated_delta_rule"):
        rule = getattr(qwen3_5, name)

        def record(query, *rest, rule=rule, name=name):
            seen.append((name.split("_")[0], len(query)))
            return rule(query, *rest)

        monkeypatch.setattr(qwen3_5, name, record)
    run = driver(model)
    run.step({"b": 33}, {"b": OTHER})
    assert set(seen) == {("chunked", 33)}
    seen.clear()
    run.step({"b": 1, "a": 30}, {"a": PROMPT})
    assert seen == [("recurrent", 1), ("chunked", 30)] * 6


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ("full_attention",) * 3},
        {"layer_types": ("linear_attention",) * 3},
        {"tie_word_embeddings": True},
    ],
)
def test_variants_are_chunk_invariant(driver, make_model, changes):
    model = make_model(**changes)
    whole = driver(model).step({"a": 70}, {"a": PROMPT})["a"]
    run = driver(model)
    run.step({"a": 23}, {"a": PROMPT})
    assert np.abs(run.step({"a": 47})["a"] - whole).max() < BOUND


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_drafts_give_the_logits_of_sequential_decoding(driver, model, alone, accepted):
    """Right drafts and then wrong ones, twice in a row; beside a row without drafts."""
    logits, tokens = alone
    run = driver(model, num_drafts=3)
    found = run.run(run.plan({"a": 70}, {"a": PROMPT}))
    run.keep({"a": [tokens[70]]})
    done = 0
    for _ in range(2):
        wrong = (tokens[71 + done + accepted] + 1) % 512
        drafts = tokens[71 + done : 71 + done + accepted] + [wrong] * (3 - accepted)
        prompts = {"b": OTHER} if done == 0 else None
        scheduled = {"a": 4, "b": 33 if done == 0 else 1}
        found = run.run(run.plan(scheduled, prompts, {"a": drafts}))["a"]
        expected = logits[1 + done : 2 + done + accepted]
        assert np.abs(found[: accepted + 1] - expected).max() < BOUND
        run.keep({"a": tokens[71 + done : 72 + done + accepted], "b": [OTHER[0]]})
        done += 1 + accepted


def test_an_earlier_state_is_never_read_silently(driver, model):
    run = driver(model)
    run.step({"a": 40}, {"a": PROMPT})
    run.computed["a"] = 39  # as if a scheduler had miscounted
    with pytest.raises(MemoryAccessError, match="after 39 tokens: it holds the one after 40"):
        run.step({"a": 1})


def test_reading_another_requests_table_fails(driver, model):
    run = driver(model)
    run.step({"a": 40, "b": 20}, {"a": PROMPT, "b": OTHER})
    record = run.plan({"a": 5, "b": 5})
    metadata = record.attention[0]
    swapped = replace(metadata, block_tables=metadata.block_tables[::-1])
    with pytest.raises(MemoryAccessError, match="reads"):
        run.run(replace(record, attention=(swapped,)))


def test_from_weights_names_what_does_not_fit():
    config = tiny.config()
    weights = dict(tiny.weights(config, 0))
    norm = weights.pop("model.norm.weight")
    with pytest.raises(ConfigError, match=r"'model.norm.weight' is None: must be \(64,\)"):
        from_weights(config, weights)
    with pytest.raises(ConfigError, match=r"'model.norm.weight' is \(63,\): must be \(64,\)"):
        from_weights(config, weights | {"model.norm.weight": norm[1:]})
    with pytest.raises(ConfigError, match=r"'visual.x': must be a parameter of the model"):
        from_weights(config, weights | {"model.norm.weight": norm, "visual.x": norm})
