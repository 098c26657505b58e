"""Sequences and groups of the fast V0 scheduler, changed in place.

A group keeps the lists of its running and swapped sequences, which the release looks for again
and again, and how many of its sequences are not finished.
"""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence

from servespec.reference.contracts import SamplingParams
from servespec.reference.contracts.v0 import (
    SequenceGroupRequest,
    SequenceSnapshot,
    SequenceStatus,
)

__all__ = ["Group", "Sequence"]


class Sequence:
    """One sequence; its tokens are needed only to tell when to stop.

    Parameters
    ----------
    seq_id : int
    num_prompt_tokens : int

    Attributes
    ----------
    outputs : list of int
        Output tokens.
    status : SequenceStatus
    prefill : bool
        Whether known tokens are still to be computed from the start.
    computed : int
        Tokens that went through the model.
    """

    __slots__ = ("computed", "num_prompt_tokens", "outputs", "prefill", "seq_id", "status")

    def __init__(self, seq_id: int, num_prompt_tokens: int) -> None:
        self.seq_id = seq_id
        self.num_prompt_tokens = num_prompt_tokens
        self.outputs: list[int] = []
        self.status = SequenceStatus.WAITING
        self.prefill = True
        self.computed = 0

    @property
    def length(self) -> int:
        """Known tokens."""
        return self.num_prompt_tokens + len(self.outputs)

    def copy(self, seq_id: int) -> Sequence:
        """Return a twin under another id."""
        twin = Sequence(seq_id, self.num_prompt_tokens)
        twin.outputs = self.outputs.copy()
        twin.status, twin.prefill, twin.computed = self.status, self.prefill, self.computed
        return twin

    def take(self, token_id: int, params: SamplingParams, max_model_len: int) -> None:
        """Append an output token and finish if it is the last."""
        self.outputs.append(token_id)
        count = len(self.outputs)
        if count < params.min_tokens:
            return
        if token_id == params.eos_token_id or token_id in params.stop_token_ids:
            self.status = SequenceStatus.FINISHED_STOPPED
        elif self.length > max_model_len or count == params.max_tokens:
            self.status = SequenceStatus.FINISHED_LENGTH_CAPPED

    def snapshot(self) -> SequenceSnapshot:
        """Return what checks compare."""
        return SequenceSnapshot(
            seq_id=self.seq_id,
            status=self.status,
            is_prefill=self.prefill,
            num_computed_tokens=self.computed,
            output_token_ids=tuple(self.outputs),
        )


class Group:
    """One request.

    Parameters
    ----------
    request : SequenceGroupRequest
    seq_id : int
        Of its first sequence.

    Attributes
    ----------
    seqs : list of Sequence
        All that were not dropped, oldest first.
    live : list of Sequence
        Those of them that are not finished; at any time all in the status of the group's queue.
    """

    __slots__ = ("arrival_time", "live", "request", "request_id", "seqs")

    def __init__(self, request: SequenceGroupRequest, seq_id: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.arrival_time = request.arrival_time
        self.seqs = [Sequence(seq_id, len(request.prompt_token_ids))]
        self.live = self.seqs.copy()

    @property
    def prefill(self) -> bool:
        """Stage of the first sequence, finished or not."""
        return self.seqs[0].prefill

    @property
    def width(self) -> int:
        """Sequences to reckon with in the budget."""
        best_of = self.request.best_of
        if self.request.use_beam_search or best_of > len(self.seqs):
            return best_of
        return len(self.live)

    def num_new_tokens(self) -> int:
        """Return the tokens the group would compute next, were there no budget."""
        return sum(seq.length - seq.computed if seq.prefill else 1 for seq in self.live)

    def lengths(self) -> list[tuple[int, int]]:
        """Return id and known tokens of every live sequence."""
        return [(seq.seq_id, seq.length) for seq in self.live]

    def seq_ids(self) -> list[int]:
        """Return the ids of the live sequences."""
        return [seq.seq_id for seq in self.live]

    def move_to(self, status: SequenceStatus) -> None:
        """Put every live sequence into a status."""
        for seq in self.live:
            seq.status = status

    def advance(self, count: int) -> None:
        """Count computed tokens of every live sequence; one with none left decodes next."""
        for seq in self.live:
            seq.computed += count
            if seq.computed == seq.length:
                seq.prefill = False

    def restart(self) -> None:
        """Wait to be computed again from the first token."""
        for seq in self.live:
            seq.status, seq.prefill, seq.computed = SequenceStatus.WAITING, True, 0

    def replace(
        self, dropped: GenericSequence[Sequence], forked: GenericSequence[Sequence]
    ) -> None:
        """Drop some sequences, add others at the end, and look which are left."""
        if dropped or forked:
            gone = {seq.seq_id for seq in dropped}
            self.seqs = [seq for seq in self.seqs if seq.seq_id not in gone]
            self.seqs += forked
        self.live = [seq for seq in self.seqs if not seq.status.is_finished]
