"""The legacy scheduler worked out by hand: source-2's example and table, and V0's oddities.

Every example runs on the reference and on the fast scheduler; the numbers are derived in the
comments or copied from source-2, never from either of them.
"""

import pytest

from servespec.conformance.adapters.v0_reference import ReferenceV0Scheduler
from servespec.fast.scheduling.v0 import Scheduler as FastV0Scheduler
from servespec.reference.contracts import SamplingParams
from servespec.reference.contracts.v0 import (
    SequenceGroupRequest,
    SequenceSample,
    V0CacheConfig,
    V0SchedulerConfig,
)


class Runner:
    """A scheduler and a clock; every sequence samples token 9 unless told otherwise."""

    def __init__(self, kind, scheduler, cache):
        self.scheduler = kind(V0SchedulerConfig(**scheduler), V0CacheConfig(**cache))
        self.best_of = {}
        self.now = 100.0
        self.output = self.results = None

    def add(self, name, prompt, best_of=1, at=None, beams=False, **sampling):
        self.best_of[name] = best_of
        self.scheduler.add_seq_group(
            SequenceGroupRequest(
                request_id=name,
                prompt_token_ids=(1,) * prompt,
                sampling_params=SamplingParams(**{"max_tokens": 1000, **sampling}),
                best_of=best_of,
                use_beam_search=beams,
                arrival_time=self.now if at is None else at,
            )
        )

    def plan(self):
        self.now += 1.0
        self.output = self.scheduler.schedule(self.now)
        return self.output

    def step(self, **samples):
        """Plan and sample; `samples` gives (parent, token) pairs of a request."""
        output = self.plan()
        sequences = self.state.sequences
        sampled = {}
        for group in output.scheduled_seq_groups:
            if not group.do_sample:
                continue
            parents = list(group.block_tables)
            fresh = not sequences[group.request_id][0].output_token_ids
            wanted = parents * self.best_of[group.request_id] if fresh else parents
            pairs = samples.get(group.request_id, [(parent, 9) for parent in wanted])
            sampled[group.request_id] = tuple(
                SequenceSample(parent_seq_id=parent, token_id=token) for parent, token in pairs
            )
        self.results = self.scheduler.update_from_output(output, sampled)
        return output

    @property
    def state(self):
        return self.scheduler.snapshot()


@pytest.fixture(params=[ReferenceV0Scheduler, FastV0Scheduler], ids=["reference", "fast"])
def runner(request):
    def make(scheduler, cache):
        return Runner(request.param, scheduler, cache)

    return make


@pytest.fixture
def chunks():
    """Tokens of each scheduled group."""
    return lambda output: {
        group.request_id: group.token_chunk_size for group in output.scheduled_seq_groups
    }


@pytest.fixture
def names():
    """The scheduled groups in order."""
    return lambda output: [group.request_id for group in output.scheduled_seq_groups]


@pytest.fixture
def blocks():
    def fields(num_gpu_blocks, num_cpu_blocks=0, block_size=4, watermark=0.0):
        return {
            "num_gpu_blocks": num_gpu_blocks,
            "num_cpu_blocks": num_cpu_blocks,
            "block_size": block_size,
            "watermark": watermark,
        }

    return fields


@pytest.fixture
def default():
    """Fields of a scheduler with the default policy."""

    def fields(tokens=64, seqs=8, length=64, **more):
        return {
            "max_num_batched_tokens": tokens,
            "max_num_seqs": seqs,
            "max_model_len": length,
            **more,
        }

    return fields


@pytest.fixture
def chunked(default):
    """The same with the chunked policy."""

    def fields(tokens=64, seqs=8, length=64, **more):
        return default(tokens, seqs, length, enable_chunked_prefill=True, **more)

    return fields
