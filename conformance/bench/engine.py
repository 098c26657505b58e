"""The fast engine beside the reference on the embedded model.

Both serve the same requests in turns, so that a busy machine slows both, and a figure is given
only if their tokens are equal. torch is held to one thread, as in the workers that run suites;
NumPy takes that from the environment, which the command sets.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from servespec.conformance.adapters.base import EngineFactory, EngineUnderTest
from servespec.conformance.adapters.fast import FastImplementation
from servespec.conformance.adapters.reference import ReferenceImplementation
from servespec.reference.contracts import (
    CacheConfig,
    EngineConfig,
    Request,
    SamplingParams,
    SchedulerConfig,
    gdn_groups_first,
)
from servespec.reference.models import tiny

__all__ = ["EngineBench", "bench_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBench:
    """What a run measured.

    Attributes
    ----------
    requests, prompt_tokens, output_tokens : int
        Of each round; tokens are of one request.
    equal : bool
        Whether both gave the same tokens.
    reference, fast : tuple of float
        Seconds of each round.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    equal: bool
    reference: tuple[float, ...]
    fast: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """How many times as fast the fast engine is, by medians."""
        return statistics.median(self.reference) / statistics.median(self.fast)

    def tokens_per_second(self, seconds: tuple[float, ...]) -> float:
        """Output tokens a second, by the median."""
        return self.requests * self.output_tokens / statistics.median(seconds)


def bench_engine(
    *,
    requests: int = 16,
    prompt_tokens: int = 64,
    output_tokens: int = 32,
    rounds: int = 5,
    progress: Callable[[int], object] | None = None,
) -> EngineBench:
    """Measure both engines.

    Parameters
    ----------
    requests, prompt_tokens, output_tokens : int
    rounds : int
    progress : callable, optional
        Told the number of rounds done.
    """
    model = tiny.config()
    weights = tiny.weights(model, 0)
    groups = gdn_groups_first(model.layer_types)
    length = prompt_tokens + output_tokens
    config = EngineConfig(
        scheduler=SchedulerConfig(
            max_num_seqs=requests, max_num_batched_tokens=256, max_model_len=length + 1
        ),
        cache=CacheConfig(
            num_gpu_blocks=1 + requests * (len(groups) + -(-length // 16)), groups=groups
        ),
    )
    fill = random.Random(0)
    work = [
        Request(
            request_id=f"r{index}",
            prompt_token_ids=tuple(fill.randrange(model.vocab_size) for _ in range(prompt_tokens)),
            sampling_params=SamplingParams(max_tokens=output_tokens),
        )
        for index in range(requests)
    ]
    implementations: tuple[EngineFactory, EngineFactory] = (
        ReferenceImplementation(),
        FastImplementation(),
    )
    seconds: tuple[list[float], list[float]] = ([], [])
    tokens: list[dict[str, tuple[int, ...]]] = [{}, {}]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(rounds):
            for side, implementation in enumerate(implementations):
                engine = implementation.make_engine(model, weights, config)
                start = time.perf_counter()
                tokens[side] = _serve(engine, work)
                seconds[side].append(time.perf_counter() - start)
            if progress is not None:
                progress(number + 1)
    finally:
        torch.set_num_threads(threads)
    return EngineBench(
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        equal=tokens[0] == tokens[1],
        reference=tuple(seconds[0]),
        fast=tuple(seconds[1]),
    )


def _serve(engine: EngineUnderTest, work: list[Request]) -> dict[str, tuple[int, ...]]:
    tokens: dict[str, tuple[int, ...]] = {request.request_id: () for request in work}
    for request in work:
        engine.add_request(request)
    while engine.has_unfinished_requests():
        for output in engine.step().outputs:
            tokens[output.request_id] += output.new_token_ids
    return tokens
