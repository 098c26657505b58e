from dataclasses import dataclass, field, replace

import pytest

from servespec.reference.contracts import (
    CacheConfig,
    KVCacheGroup,
    PauseState,
    Request,
    RequestStatus,
    SamplingParams,
    SchedulerConfig,
    SpeculativeConfig,
)
from servespec.reference.scheduling import v1

DENSE = (KVCacheGroup(layer_type="full_attention", layer_indices=(0, 1)),)
HYBRID = (
    KVCacheGroup(layer_type="linear_attention", layer_indices=(0, 2)),
    KVCacheGroup(layer_type="full_attention", layer_indices=(1, 3)),
)


def make_request(name, prompt, max_tokens=4, priority=0, arrival=0.0, **params):
    """A request; a number as prompt stands for that many tokens of its own."""
    if isinstance(prompt, int):
        prompt = range(1000 * sum(name.encode()), 1000 * sum(name.encode()) + prompt)
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        priority=priority,
        arrival_time=arrival,
    )


@dataclass
class Driver:
    """A state that moves on, and the plan of the last step."""

    state: v1.SchedulerState
    tokens: int = 0
    output: object = None
    in_flight: list = field(default_factory=list)

    def add(self, *args, **kwargs):
        self.state = v1.add_request(self.state, make_request(*args, **kwargs))
        return self

    def schedule(self, throttle=False):
        self.state, self.output = v1.schedule(self.state, throttle)
        return dict(self.output.num_scheduled_tokens)

    def update(self, output=None, **sampled):
        """Sample one new token for each row that has caught up, or what is given."""
        output = output or self.output
        tokens = {}
        for name in output.num_scheduled_tokens:
            request = self.state.requests.get(name)
            if name in sampled:
                tokens[name] = sampled[name]
            elif request is not None and not request.is_prefill_chunk:
                self.tokens += 1
                tokens[name] = (self.tokens,)
        self.state, outputs = v1.update_from_output(self.state, output, tokens)
        return outputs

    def step(self, **sampled):
        scheduled = self.schedule()
        self.update(**sampled)
        return scheduled

    def until(self, reached):
        """Step until something holds, which must not take long."""
        for _ in range(30):
            if reached():
                return
            self.step()
        raise AssertionError("not reached in 30 steps")

    def finish(self, *names, status=RequestStatus.FINISHED_ABORTED):
        self.state = v1.finish_requests(self.state, names, status)

    def pause(self, state: PauseState):
        self.state = v1.set_pause_state(self.state, state)

    def drafts(self, **drafts):
        self.state = v1.update_draft_token_ids(self.state, drafts)

    def reset(self, running=False):
        self.state, done = v1.reset_prefix_cache(self.state, running)
        return done

    def table(self, name):
        return self.state.cache.block_table(name)

    def new(self, name):
        """The row of a request that this step admits."""
        return next(row for row in self.output.scheduled_new_reqs if row.req_id == name)

    def fork(self):
        return replace(self)

    @property
    def free(self):
        return self.state.cache.pool.free

    def __getitem__(self, name):
        return self.state.requests[name]


@pytest.fixture
def driver():
    """Make a scheduler from fields of its configurations."""

    def make(
        budget=16,
        num_blocks=20,
        block_size=4,
        groups=DENSE,
        caching=False,
        mode="none",
        unit=None,
        method=None,
        drafts=0,
        max_model_len=64,
        **fields,
    ):
        scheduler = SchedulerConfig(
            max_num_batched_tokens=budget,
            **({"max_num_seqs": 8, "max_model_len": max_model_len} | fields),
        )
        cache = CacheConfig(
            num_gpu_blocks=num_blocks,
            block_size=block_size,
            groups=groups,
            enable_prefix_caching=caching,
            mamba_cache_mode=mode,
            prefix_match_unit=unit,
        )
        speculative = None
        if method is not None:
            speculative = SpeculativeConfig(method=method, num_speculative_tokens=drafts)
        return Driver(v1.initial_state(scheduler, cache, speculative))

    return make


@pytest.fixture
def aligned(driver):
    """A scheduler of a hybrid model whose GDN states are kept at block boundaries."""

    def make(**fields):
        return driver(**({"groups": HYBRID, "caching": True, "mode": "align"} | fields))

    return make
