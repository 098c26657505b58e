"""What sampled tokens do to a V0 sequence group: append, fork, drop, finish.

Source: ``SingleStepOutputProcessor`` of ``vllm/engine/output_processor/single_step.py`` of vLLM
0.5.1. Which beams live on is chosen by whoever samples; a parent without samples is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from dataclasses import replace

from servespec.reference.cache.v0_space import BlockSpace
from servespec.reference.contracts.errors import RequestError
from servespec.reference.contracts.v0 import (
    SequenceGroupOutput,
    SequenceOutput,
    SequenceSample,
    SequenceStatus,
    V0SchedulerConfig,
)
from servespec.reference.scheduling.v0_manager import BlockManager
from servespec.reference.scheduling.v0_sequences import (
    Sequence,
    SequenceGroup,
    append_token,
    status_after_token,
)

__all__ = ["process_outputs"]


def process_outputs(
    group: SequenceGroup,
    samples: GenericSequence[SequenceSample],
    space: BlockSpace,
    manager: BlockManager,
    next_seq_id: int,
    config: V0SchedulerConfig,
) -> tuple[SequenceGroup, BlockSpace, int, SequenceGroupOutput]:
    """Give every running sequence its samples.

    In this order, which decides what is free next: sequences without a sample are dropped and
    freed; forks get ids and tokens, each parent keeping its last sample; the forks that did not
    finish at once share their parent's blocks; parents that finished are freed. Finished
    sequences stay in the group, forks come after all older sequences.

    Parameters
    ----------
    group : SequenceGroup
        Its computed tokens already counted.
    samples : sequence of SequenceSample
    space : BlockSpace
    manager : BlockManager
    next_seq_id : int
        Id of the first fork.
    config : V0SchedulerConfig

    Returns
    -------
    SequenceGroup
    BlockSpace
    int
        Id of the next fork.
    SequenceGroupOutput

    Raises
    ------
    RequestError
        If there are no samples, or one names a sequence that does not run.
    """
    parents = group.with_seqs_in(SequenceStatus.RUNNING)
    _check_parents(group, parents, samples)
    dropped: set[int] = set()
    continued: dict[int, Sequence] = {}
    forks: list[tuple[int, Sequence]] = []
    outputs: list[SequenceOutput] = []
    for parent in parents:
        tokens = [s.token_id for s in samples if s.parent_seq_id == parent.seq_id]
        if not tokens:
            space = manager.free(space, parent.seq_id)
            dropped.add(parent.seq_id)
            continue
        for token in tokens[:-1]:
            fork = replace(_advanced(parent, token, group, config), seq_id=next_seq_id)
            next_seq_id += 1
            forks.append((parent.seq_id, fork))
            outputs.append(_output(fork, parent, token))
        continued[parent.seq_id] = _advanced(parent, tokens[-1], group, config)
        outputs.append(_output(continued[parent.seq_id], parent, tokens[-1]))
    for parent_seq_id, fork in forks:
        if not fork.status.is_finished:
            space = manager.fork(space, parent_seq_id, fork.seq_id)
    for seq in continued.values():
        if seq.status.is_finished:
            space = manager.free(space, seq.seq_id)
    seqs = (
        *(continued.get(seq.seq_id, seq) for seq in group.seqs if seq.seq_id not in dropped),
        *(fork for _, fork in forks),
    )
    group = replace(group, seqs=seqs)
    result = SequenceGroupOutput(
        request_id=group.request_id, outputs=tuple(outputs), finished=group.is_finished
    )
    return group, space, next_seq_id, result


def _advanced(
    seq: Sequence, token: int, group: SequenceGroup, config: V0SchedulerConfig
) -> Sequence:
    seq = append_token(seq, token)
    status = status_after_token(seq, group.request.sampling_params, config.max_model_len)
    return replace(seq, status=status)


def _output(seq: Sequence, parent: Sequence, token: int) -> SequenceOutput:
    return SequenceOutput(
        seq_id=seq.seq_id,
        parent_seq_id=parent.seq_id,
        new_token_id=token,
        finish_reason=seq.status.finish_reason,
    )


def _check_parents(
    group: SequenceGroup,
    parents: tuple[Sequence, ...],
    samples: GenericSequence[SequenceSample],
) -> None:
    running = {parent.seq_id for parent in parents}
    if not samples:
        raise RequestError(f"request {group.request_id!r} was to sample and has no samples")
    for sample in samples:
        if sample.parent_seq_id not in running:
            raise RequestError(
                f"request {group.request_id!r}: sampled sequence {sample.parent_seq_id} is not "
                f"among its running ones {sorted(running)}"
            )
