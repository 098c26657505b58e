from collections.abc import Callable, Mapping, Sequence

import pytest

from servespec.reference.batch.persistent import append_sampled, empty_batch
from servespec.reference.batch.prepare import prepare
from servespec.reference.cache.memory import Memory, initial_memory
from servespec.reference.contracts import (
    BatchRecord,
    BlockTable,
    CacheConfig,
    CachedRequestData,
    EngineConfig,
    ModelConfig,
    NewRequestData,
    Quirks,
    SamplingParams,
    SchedulerConfig,
    SchedulerOutput,
    SpeculativeConfig,
    gdn_groups_first,
)
from servespec.reference.models import tiny
from servespec.reference.models.qwen3_5 import Qwen3_5, forward, from_weights


class Driver:
    """Runs a model step by step on plans written out by hand: no scheduler involved.

    Each request owns blocks that no other one has, in an order that is not ascending.
    """

    def __init__(
        self,
        model: Qwen3_5,
        block_size: int = 16,
        kernel_block_size: int | None = None,
        num_drafts: int = 0,
        quirks: Quirks | None = None,
    ) -> None:
        self.model = model
        self.config = EngineConfig(
            scheduler=SchedulerConfig(max_model_len=512, quirks=quirks or Quirks()),
            cache=CacheConfig(
                num_gpu_blocks=400,
                block_size=block_size,
                kernel_block_size=kernel_block_size,
                groups=gdn_groups_first(model.config.layer_types),
            ),
            speculative=(
                SpeculativeConfig(method="mtp", num_speculative_tokens=num_drafts)
                if num_drafts
                else None
            ),
        )
        self.memory: Memory = initial_memory(
            self.config.cache.groups, block_size, kernel_block_size
        )
        self.batch = empty_batch()
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.num_drafts = num_drafts
        self._free = list(range(1, 400))
        self.record: BatchRecord | None = None

    def _blocks(self, num_tokens: int) -> BlockTable:
        size = self.config.cache.block_size
        table = []
        for group in self.config.cache.groups:
            is_gdn = group.layer_type == "linear_attention"
            count = 1 + self.num_drafts if is_gdn else -(-num_tokens // size)
            table.append(tuple(self._free.pop() for _ in range(count)))
        return tuple(table)

    def plan(
        self,
        scheduled: Mapping[str, int],
        prompts: Mapping[str, Sequence[int]] | None = None,
        drafts: Mapping[str, Sequence[int]] | None = None,
    ) -> BatchRecord:
        """Prepare a step; `prompts` are those of requests that appear for the first time."""
        prompts, drafts = prompts or {}, drafts or {}
        new = tuple(
            NewRequestData(
                req_id=req_id,
                prompt_token_ids=tuple(prompt),
                sampling_params=SamplingParams(),
                block_ids=self._blocks(len(prompt) + 64),
                num_computed_tokens=0,
            )
            for req_id, prompt in prompts.items()
        )
        known = [req_id for req_id in scheduled if req_id not in prompts]
        output = SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=tuple(known),
                new_block_ids=(None,) * len(known),
                num_computed_tokens=tuple(self.computed[req_id] for req_id in known),
                num_output_tokens=tuple(
                    len(self.tokens[req_id]) - self.batch.requests[req_id].num_prompt_tokens
                    for req_id in known
                ),
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={key: tuple(value) for key, value in drafts.items()},
        )
        for req_id, prompt in prompts.items():
            self.tokens[req_id], self.computed[req_id] = list(prompt), 0
        self.batch, self.record = prepare(self.batch, output, self.config)
        return self.record

    def run(self, record: BatchRecord) -> dict[str, object]:
        """Run a prepared step; logits of each request, all that the record asks for."""
        logits, self.memory = forward(self.model, record, self.config.cache.groups, self.memory)
        counts = record.num_draft_tokens or (0,) * len(record.req_ids)
        found, start = {}, 0
        for req_id, count in zip(record.req_ids, counts, strict=True):
            found[req_id] = logits[start : start + count + 1]
            start += count + 1
        return found

    def keep(self, kept: Mapping[str, Sequence[int]]) -> None:
        """Note which tokens each row of the step went on with, and so what is computed."""
        assert self.record is not None
        counts = self.record.num_draft_tokens or (0,) * len(self.record.req_ids)
        for req_id, end, count in zip(
            self.record.req_ids, self.record.seq_lens, counts, strict=True
        ):
            rejected = count - (len(kept[req_id]) - 1) if count else 0
            self.computed[req_id] = end - rejected
            self.tokens[req_id] += kept.get(req_id, ())
        self.batch = append_sampled(self.batch, {k: tuple(v) for k, v in kept.items()})

    def step(
        self,
        scheduled: Mapping[str, int],
        prompts: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, object]:
        """Plan, run and go on greedily."""
        record = self.plan(scheduled, prompts)
        logits = self.run(record)
        self.keep(
            {
                req_id: [int(logits[req_id][-1].argmax())]
                for req_id, keep in zip(record.req_ids, record.sampled, strict=True)
                if keep
            }
        )
        return logits


@pytest.fixture(scope="session")
def driver() -> type[Driver]:
    return Driver


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Qwen3_5]:
    def make(seed: int = 0, **changes: object) -> Qwen3_5:
        config: ModelConfig = tiny.config(**changes)
        return from_weights(config, tiny.weights(config, seed))

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., Qwen3_5]) -> Qwen3_5:
    return make_model()
