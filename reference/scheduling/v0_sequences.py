"""Sequences and sequence groups of the V0 scheduler.

A group is one request. It starts with one sequence, the prompt; sampling can fork it into several
that share the prompt and go on side by side. A sequence is in *prefill* until all its known tokens
are computed, and again after it was preempted for recomputation, where its own output counts as
prompt.

Source: ``vllm/sequence.py`` and ``vllm/engine/output_processor/stop_checker.py`` of vLLM 0.5.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from servespec.reference.contracts.request import SamplingParams
from servespec.reference.contracts.v0 import SequenceGroupRequest, SequenceStatus

__all__ = [
    "Sequence",
    "SequenceGroup",
    "append_token",
    "num_uncomputed_tokens",
    "reset_for_recompute",
    "status_after_token",
    "update_num_computed_tokens",
    "with_status",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One sequence of tokens.

    Attributes
    ----------
    seq_id : int
        Unique in the life of a scheduler; forks get ids as they come up.
    prompt_token_ids, output_token_ids : tuple of int
    status : SequenceStatus
    is_prefill : bool
        The stage; a finished sequence keeps its last one.
    num_computed_tokens : int
        Tokens that went through the model.
    """

    seq_id: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...] = ()
    status: SequenceStatus = SequenceStatus.WAITING
    is_prefill: bool = True
    num_computed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens the sequence would compute next: 1 in decode, all that remain in prefill."""
        return num_uncomputed_tokens(self) if self.is_prefill else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    """A request and its sequences, oldest first; finished ones stay, dropped ones do not."""

    request: SequenceGroupRequest
    seqs: tuple[Sequence, ...]

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    @property
    def is_prefill(self) -> bool:
        """Stage of the first sequence, which is asked for the whole group even if it finished.

        The release takes all sequences to be in one stage. That fails for a group recomputed
        after its first sequence finished: it then counts as a decode.
        """
        return self.seqs[0].is_prefill

    @property
    def is_finished(self) -> bool:
        """Whether no sequence is left."""
        return all(seq.status.is_finished for seq in self.seqs)

    @property
    def max_num_running_seqs(self) -> int:
        """Sequences that may yet run in parallel, which is what the group counts in a budget.

        A group that has not forked to its full width counts with that width; beam search always
        does, because beams are replaced.
        """
        best_of = self.request.best_of
        if self.request.use_beam_search or best_of > len(self.seqs):
            return best_of
        return sum(not seq.status.is_finished for seq in self.seqs)

    def with_seqs_in(self, status: SequenceStatus) -> tuple[Sequence, ...]:
        """Return the sequences in a status, in order."""
        return tuple(seq for seq in self.seqs if seq.status is status)


def num_uncomputed_tokens(seq: Sequence) -> int:
    """Return the known tokens that did not go through the model yet."""
    return seq.num_tokens - seq.num_computed_tokens


def append_token(seq: Sequence, token_id: int) -> Sequence:
    """Add an output token; it is not computed yet."""
    return replace(seq, output_token_ids=(*seq.output_token_ids, token_id))


def reset_for_recompute(seq: Sequence) -> Sequence:
    """Forget all that was computed: the sequence waits with its output as part of the prompt."""
    return replace(seq, status=SequenceStatus.WAITING, is_prefill=True, num_computed_tokens=0)


def with_status(group: SequenceGroup, old: SequenceStatus, new: SequenceStatus) -> SequenceGroup:
    """Move all sequences of a group that are in one status to another."""
    return replace(
        group,
        seqs=tuple(replace(seq, status=new) if seq.status is old else seq for seq in group.seqs),
    )


def update_num_computed_tokens(group: SequenceGroup, count: int) -> SequenceGroup:
    """Note that every unfinished sequence computed `count` tokens; a complete one decodes next."""

    def updated(seq: Sequence) -> Sequence:
        if seq.status.is_finished:
            return seq
        computed = seq.num_computed_tokens + count
        return replace(
            seq,
            num_computed_tokens=computed,
            is_prefill=seq.is_prefill and computed < seq.num_tokens,
        )

    return replace(group, seqs=tuple(updated(seq) for seq in group.seqs))


def status_after_token(seq: Sequence, params: SamplingParams, max_model_len: int) -> SequenceStatus:
    """Tell whether the newest output token ends a sequence.

    Before `SamplingParams.min_tokens` nothing does. Then, in this order: the end-of-sequence
    token, a stop token, *more* tokens than `max_model_len`, exactly `max_tokens` of output.
    """
    num_output = len(seq.output_token_ids)
    if num_output < params.min_tokens:
        return seq.status
    last = seq.output_token_ids[-1]
    if last == params.eos_token_id or last in params.stop_token_ids:
        return SequenceStatus.FINISHED_STOPPED
    if seq.num_tokens > max_model_len or num_output == params.max_tokens:
        return SequenceStatus.FINISHED_LENGTH_CAPPED
    return seq.status
