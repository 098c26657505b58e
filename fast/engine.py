"""The fast engine: scheduler, batch and model together, all in place.

Source: ``EngineCore.step`` of ``vllm/v1/engine/core.py`` and ``execute_model`` of
``vllm/v1/worker/gpu_model_runner.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from servespec.fast.batch.persistent import InputBatch
from servespec.fast.cache.memory import CacheMemory, aligned_block_size, bytes_per_block
from servespec.fast.models import checkpoint
from servespec.fast.models.layers import Weights
from servespec.fast.models.qwen3_5 import Qwen3_5
from servespec.fast.progress import GenerationProgress
from servespec.fast.sampling.greedy import greedy, require_numbers
from servespec.fast.scheduling.admission import check_request
from servespec.fast.scheduling.planner import make_planner
from servespec.reference.contracts import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    ModelConfig,
    Request,
    RequestError,
    RequestStatus,
    SamplingParams,
    SchedulerConfig,
    SchedulerSnapshot,
    StepRecord,
    gdn_groups_first,
    require,
)

__all__ = ["Engine", "default_config"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DEFAULT_CACHE_BYTES = 1 << 30
_DEFAULT_MODEL_LEN = 4096


def default_config(
    model: ModelConfig, dtype: str = "float32", cache_bytes: int = _DEFAULT_CACHE_BYTES
) -> EngineConfig:
    """Return a configuration that suits a model.

    The attention block is the smallest whose page covers a GDN state, so that no page is padded;
    the pool takes `cache_bytes`, or what one request of full length needs if that is more.

    Parameters
    ----------
    model : ModelConfig
    dtype : {"float32", "bfloat16"}
    cache_bytes : int

    Returns
    -------
    EngineConfig

    Raises
    ------
    ConfigError
        The dtype is unknown.
    """
    torch_dtype = _dtype(dtype)
    max_model_len = min(model.max_position_embeddings, _DEFAULT_MODEL_LEN)
    block_size = aligned_block_size(model, torch_dtype)
    groups = gdn_groups_first(model.layer_types)
    # The null block, and for one request a state in every group and K/V of full length.
    least = 1 + sum(
        -(-max_model_len // block_size) if group.layer_type == "full_attention" else 1
        for group in groups
    )
    affordable = cache_bytes // bytes_per_block(model, groups, block_size, torch_dtype)
    return EngineConfig(
        scheduler=SchedulerConfig(max_model_len=max_model_len),
        cache=CacheConfig(
            num_gpu_blocks=max(least, affordable), block_size=block_size, groups=groups
        ),
    )


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigError("dtype", name, f"one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError("device", str(name), f"a device that torch can use ({reason})") from None
    return device


@contextmanager
def _allocating(field: str, value: object) -> Iterator[None]:
    """Blame a field for memory that there isn't."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # torch knows no type of its own for this on a CPU.
        if "alloc" not in str(error) and "memory" not in str(error):
            raise
        raise ConfigError(field, value, "small enough for the device's memory") from None


class Engine:
    """Serves requests on one model.

    Parameters
    ----------
    model_config : ModelConfig
    weights : mapping of str to numpy.ndarray or Tensor
        By Hugging Face names.
    engine_config : EngineConfig
    dtype : {"float32", "bfloat16"}
        Of weights, activations and K/V.
    device : str or torch.device
    record : bool
        Whether `step` describes the batch (and logits, if the configuration keeps them). Without
        it a record holds the plan, the tokens and the outputs only, and a step costs less.

    Raises
    ------
    ConfigError
        A configuration, the dtype, the device or the weights do not fit; drafts are asked for,
        which need a drafter.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        weights: Weights,
        engine_config: EngineConfig,
        dtype: str = "float32",
        device: str | torch.device = "cpu",
        *,
        record: bool = True,
    ) -> None:
        require(
            engine_config.speculative is None,
            "EngineConfig.speculative",
            engine_config.speculative,
            "None: this engine has no drafter",
        )
        torch_dtype, torch_device = _dtype(dtype), _device(device)
        self.config = engine_config
        self.record = record
        cache, max_model_len = engine_config.cache, engine_config.scheduler.max_model_len
        with _allocating("CacheConfig.num_gpu_blocks", cache.num_gpu_blocks):
            self.memory = CacheMemory(model_config, cache, torch_dtype, torch_device)
        with _allocating("SchedulerConfig.max_model_len", max_model_len):
            self.model = Qwen3_5(model_config, weights, torch_dtype, torch_device, max_model_len)
        scheduler = engine_config.scheduler
        most = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        with _allocating("SchedulerConfig.max_num_seqs, max_num_batched_tokens", most):
            self._scheduler = make_planner(engine_config)
            self._batch = InputBatch(engine_config, torch_device)
        self._num_steps = 0
        self._num_generated = 0
        # Within `generate` all requests are one caller's, who is told when a model gives no
        # numbers; a server's other requests go on.
        self._alone = False

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        engine_config: EngineConfig | None = None,
        dtype: str = "float32",
        device: str | torch.device = "cpu",
        *,
        record: bool = True,
    ) -> Engine:
        """Load a Hugging Face checkpoint folder.

        Parameters
        ----------
        path : str or Path
        engine_config : EngineConfig or None
            None means `default_config`.
        dtype, device, record
            As for `Engine`.

        Raises
        ------
        CheckpointError
            The folder or a file in it cannot be read.
        ConfigError
            As for `Engine`.
        """
        _dtype(dtype)
        model_config, weights = checkpoint.load(path)
        config = engine_config or default_config(model_config, dtype)
        return cls(model_config, weights, config, dtype, device, record=record)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises
        ------
        DuplicateRequestError
            A live request has this id.
        RequestError
            The prompt is too long, or names a token that the model does not have.
        CacheTooSmallError
            The request could not be served even alone.
        """
        self._check(request)
        self._scheduler.add_request(request)

    def _check(self, request: Request) -> None:
        largest, vocab_size = max(request.prompt_token_ids), self.model.config.vocab_size
        if largest >= vocab_size:
            raise RequestError(
                f"request {request.request_id!r}: prompt_token_ids holds {largest}:"
                f" must be below vocab_size = {vocab_size}"
            )
        check_request(request, self.config.scheduler, self.config.cache)

    def step(self, forced_token_ids: Mapping[str, tuple[int, ...]] | None = None) -> StepRecord:
        """Run one step.

        Parameters
        ----------
        forced_token_ids : mapping of str to tuple of int, optional
            Tokens with which to go on in place of those sampled, for requests of which this step
            keeps a token.

        Returns
        -------
        StepRecord
            Names the engine's own choice of tokens, forced or not.
        """
        schedule = self._scheduler.schedule()
        output = schedule.to_contract()
        self.memory.apply(output)
        sampled: dict[str, tuple[int, ...]] = {}
        logits: Tensor | None = None
        kept: Mapping[str, tuple[int, ...]] = sampled
        if output.total_num_scheduled_tokens > 0:
            inputs = self._batch.prepare(output)
            logits = self.model.forward(inputs, self.memory)
            tokens = greedy(logits)
            if self._alone:
                require_numbers(logits, tokens)
            rows = zip(inputs.req_ids, tokens.tolist(), inputs.sampled.tolist(), strict=True)
            sampled = {req_id: (token,) for req_id, token, keep in rows if keep}
            kept = sampled
            if forced_token_ids is not None:
                kept = {
                    req_id: forced_token_ids.get(req_id, own) for req_id, own in sampled.items()
                }
        else:
            self._batch.update_states(output)
        describe = self.record and logits is not None
        batch = self._batch.record() if describe else None
        if logits is not None:
            self._batch.append_sampled(kept)
        outputs = self._scheduler.update_from_output(schedule, kept)
        step = StepRecord(
            step=self._num_steps,
            scheduler_output=output,
            batch=batch,
            logits=logits.cpu().numpy()
            if describe and logits is not None and self.config.keep_logits
            else None,
            sampled_token_ids=sampled,
            outputs=outputs,
        )
        self._num_steps += 1
        return step

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests from outside; ids that are not alive are ignored."""
        self._scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def has_unfinished_requests(self) -> bool:
        """Whether any request still waits or runs."""
        return self._scheduler.has_unfinished_requests()

    def snapshot(self) -> SchedulerSnapshot:
        """Return the scheduler's state as far as checks compare it."""
        return self._scheduler.snapshot()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = True,
    ) -> list[list[int]]:
        """Serve prompts together until all have ended.

        Parameters
        ----------
        prompts : sequence of sequence of int
            Token ids.
        sampling : SamplingParams, a sequence of them, or None
            For all prompts, or one for each; None means the defaults.
        progress : bool
            Whether to show a progress bar on standard error.

        Returns
        -------
        list of list of int
            New tokens of each prompt, in the order of the prompts.

        Raises
        ------
        RequestError
            The engine still serves other requests, a prompt is refused (none is started then), or
            the requests that are left can never go on.
        ValueError
            The model's logits are not numbers.
        """
        if self.has_unfinished_requests():
            raise RequestError(
                "generate: other requests are unfinished: step until they have ended"
            )
        requests = self._requests(prompts, sampling)
        for request in requests:
            self._check(request)
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        describe, self.record, self._alone = self.record, False, True
        try:
            for request in requests:
                self._scheduler.add_request(request)
            with GenerationProgress(requests, shown=progress) as shown:
                while self.has_unfinished_requests():
                    record = self.step()
                    plan = record.scheduler_output
                    # Under V0 a step may do nothing but preempt.
                    if not (plan.total_num_scheduled_tokens or plan.preempted_req_ids):
                        raise RequestError(
                            "generate: nothing can be scheduled any more: a request that may not"
                            " stop before min_tokens has reached max_model_len"
                        )
                    for output in record.outputs:
                        tokens[output.request_id] += output.new_token_ids
                    shown.update(record.outputs)
        finally:
            self.record, self._alone = describe, False
            self.abort_requests(list(tokens))
        return list(tokens.values())

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(prompts)
        require(
            len(sampling) == len(prompts),
            "generate: len(sampling)",
            len(sampling),
            f"the number of prompts, {len(prompts)}",
        )
        first = self._num_generated
        self._num_generated += len(prompts)
        return [
            Request(
                request_id=f"generate-{number}",
                prompt_token_ids=tuple(prompt),
                sampling_params=params,
            )
            for number, (prompt, params) in enumerate(zip(prompts, sampling, strict=True), first)
        ]
