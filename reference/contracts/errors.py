"""Errors that name the field, the value and what would have been allowed.

Every error a user can cause derives from `ValueError` or `KeyError`, so that callers need not
know this package to handle it, and its text is one line that a command can print as it is.
"""

from __future__ import annotations

__all__ = [
    "CacheTooSmallError",
    "CheckpointError",
    "ConfigError",
    "DuplicateRequestError",
    "RequestError",
    "SchedulerDiedError",
    "UnknownRequestError",
    "require",
]


class ConfigError(ValueError):
    """A configuration field is out of range.

    Parameters
    ----------
    field : str
        Dotted name, for example ``SchedulerConfig.max_num_seqs``.
    value : object
        What was given.
    allowed : str
        What would have been accepted, in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {value!r}: must be {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class RequestError(ValueError):
    """A request cannot be accepted; the text names the request, the field and the limit."""


class DuplicateRequestError(RequestError):
    """A request id is already known to the scheduler."""


class CacheTooSmallError(RequestError):
    """A request can never fit into the KV cache, even alone."""


class UnknownRequestError(KeyError):
    """No live request has this id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"unknown request id {self.request_id!r}"


class SchedulerDiedError(RuntimeError):
    """The release that is reproduced fails an assertion of its own here, and its engine ends.

    Raised under a profile with oddities only: whoever reproduces the release has to fail too.
    """


class CheckpointError(ValueError):
    """A checkpoint folder or one of its files cannot be read; the text names the file and why."""


def require(condition: bool, field: str, value: object, allowed: str) -> None:
    """Raise `ConfigError` unless `condition` holds.

    Parameters
    ----------
    condition : bool
    field, value, allowed
        As for `ConfigError`.

    Raises
    ------
    ConfigError
    """
    if not condition:
        raise ConfigError(field, value, allowed)
