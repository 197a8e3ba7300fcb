"""Errors of the engine, by who has to act on them.

Asserts are for our bugs; these are for the user's and for the machine's. Every one of them can cross a process
border: it is rebuilt from its arguments.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class InvalidOption(EngineError, ValueError):
    """A value that the caller chose cannot be used. Nothing was changed."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(field, value, expected)
        self.field, self.value, self.expected = field, value, expected

    def __str__(self) -> str:
        return f"{self.field} must be {self.expected}, not {self.value!r}"


class UnusableGrammar(InvalidOption):
    """The text is no grammar of its kind, or not one for this model. Nothing was changed."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__("grammar", kind, reason)
        self.args = (kind, reason)
        self.kind, self.reason = kind, reason

    def __str__(self) -> str:
        return f"the answer's grammar is no usable {self.kind}: {self.reason}"


class InvalidCall(EngineError):
    """A call that this state does not allow: a turn on a closed request, another engine's buffer. Nothing changed."""


class WrongThread(EngineError):
    """An engine call from a thread that does not own the engine (F047)."""


class StaleView(EngineError):
    """A borrowed event was read after a later `run` reused its storage (F062)."""


class ContextLengthExceeded(EngineError):
    """The input leaves no room for a generated token (F022). `limit` is the longest sequence allowed."""

    def __init__(self, current: int, added: int, limit: int) -> None:
        super().__init__(current, added, limit)
        self.current, self.added, self.limit = current, added, limit

    def __str__(self) -> str:
        held = f"{self.current} tokens held + " if self.current else ""
        return f"{held}{self.added} input tokens leave no room for an answer in {self.limit} tokens"


class OutOfBlocks(EngineError):
    """A pool was asked for more than it has free. Callers plan first, so in a step this is a contract failure."""


class GrammarFailed(EngineError):
    """An answer's grammar gave up, by an error or a limit of its own: that turn ends, and no other one."""


class ContractViolation(EngineError):
    """Two parts of the engine disagree: fatal, the engine stops (F173)."""


class RetryableStepError(EngineError):
    """A decoder or sampler could not do this step but may do the next one: the step is rolled back."""


class SamplingFailed(RetryableStepError):
    """The model ran, and choosing tokens from its logits failed (F170)."""


class ExecutionMemoryExceeded(EngineError):
    """Memory ran out while the step ran: rolled back like a retryable error, reported as capacity (F171)."""


class EngineUnhealthy(EngineError):
    """The first fatal error of an engine, raised by every later call that would make progress (F175)."""


class ModelError(EngineError):
    """A model cannot be loaded. `model` is its path."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(model, reason)
        self.model, self.reason = model, reason

    def __str__(self) -> str:
        return f"{self.model}: {self.reason}"


class UnsupportedModel(ModelError):
    """The files are readable, but the architecture, a setting in them or a tensor is not what Moorage can run."""


class UnreadableModel(ModelError):
    """The files are missing, truncated or corrupt."""
