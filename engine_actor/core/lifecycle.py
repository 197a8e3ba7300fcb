"""The life of requests between steps: create, begin, cancel, rewind, fork, close, abandon."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence

from engine_actor.errors import (
    ContextLengthExceeded,
    EngineUnhealthy,
    InvalidCall,
    InvalidOption,
    WrongThread,
)
from engine_actor.memory.cache_manager import CacheManager
from engine_actor.options import RequestOptions, TurnOptions, require_integer
from engine_actor.requests.events import EngineEvent, ErrorCode, EventFlags, EventQueue
from engine_actor.requests.record import FinishReason, RequestRecord, RequestStatus, TokenHistory
from engine_actor.requests.request import Request
from engine_actor.requests.table import RequestTable
from engine_actor.sampling.grammars import Grammars

LAST_TURN_ID = 2**64 - 1


class Lifecycle:
    def __init__(
        self,
        *,
        cache: CacheManager,
        events: EventQueue,
        max_length: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        max_draft_tokens: int = 0,
        grammars: Grammars | None = None,
    ) -> None:
        self.cache = cache
        self.events = events
        self.max_length = max_length
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.max_draft_tokens = max_draft_tokens
        self._grammars = grammars or Grammars(None, vocab_size, eos_token_ids)
        self.requests = RequestTable()
        self.abandonment_pending = False
        self.fatal: EngineUnhealthy | None = None
        self.in_step = False
        self._owner = threading.get_ident()
        self._next_id = 1
        self._next_submission = 1

    # -- guards ---------------------------------------------------------------------------------------------------

    def check_call(self) -> None:
        """Every call comes from the owner thread and between steps."""
        if threading.get_ident() != self._owner:
            raise WrongThread("engine calls belong on the thread that made the engine")
        if self.in_step:
            raise InvalidCall("the engine cannot be called from inside its own step")

    def _check_own(self, record: RequestRecord) -> None:
        if self.requests.records.get(record.id) is not record:
            raise InvalidCall("this request does not belong to this engine")

    # -- a request's calls ----------------------------------------------------------------------------------------

    def create(self, options: RequestOptions) -> Request:
        self.check_call()
        if options.max_session_tokens > self.max_length:
            raise InvalidOption("max_session_tokens", options.max_session_tokens, f"at most {self.max_length}")
        record = RequestRecord(self._next_id, options, options.max_session_tokens or self.max_length)
        self._next_id += 1
        self.requests.records[record.id] = record
        return Request(record, self)

    def get(self, request_id: int) -> Request | None:
        """A handle of a live request; taking it again cancels its abandonment (F042)."""
        self.check_call()
        record = self.requests.records.get(request_id)
        if record is None:
            return None
        handle = record.handle() if record.handle is not None else None
        return handle if isinstance(handle, Request) else Request(record, self)

    def begin_turn(self, record: RequestRecord, tokens: Sequence[int], options: TurnOptions) -> int:
        self.check_call()
        if self.fatal is not None:
            raise self.fatal.with_traceback(None)
        if record.status is RequestStatus.CLOSED:
            raise InvalidCall("a closed request cannot begin a turn")
        self._check_own(record)
        self.reclaim_abandoned()
        if record.status not in (RequestStatus.NEW, RequestStatus.IDLE):
            raise InvalidCall(f"turn {record.turn_id} is still running")
        if record.pending_events:
            raise InvalidCall(f"{record.pending_events} events of turn {record.turn_id} are not drained yet")
        if record.turn_id == LAST_TURN_ID:
            raise InvalidCall("this request has used up its turn ids; create a new one")
        added = self._checked_tokens(record, tokens)
        self._check_options(record, len(added), options)
        guide = None if options.grammar is None else self._grammars.cursor(options.grammar)
        self._append(record, added)
        record.status = RequestStatus.WAITING
        record.turn_id += 1
        record.turn_options = options
        record.turn_prompt_tokens = len(added)
        record.turn_generated = options.resumed_tokens
        record.cached_tokens = record.num_computed_tokens
        record.prompt_boundary = length = record.history.length
        limit = options.max_generated_tokens
        begin = length - options.resumed_tokens  # of the answer
        record.end_length = min(record.max_total, begin + limit) if limit else record.max_total
        eos = frozenset() if options.ignore_eos else self.eos_token_ids
        record.end_tokens = eos | options.stop_token_ids
        record.grammar_cursor = guide
        record.plain = not (options.min_generated_tokens or options.sampling.reshapes or guide)
        record.finish_reason = None
        record.admitted = False
        record.match_cache = None
        record.passed_over = record.overtaken = record.preemptions = 0
        record.submitted = self._next_submission
        self._next_submission += 1
        return record.turn_id

    def cancel_turn(self, record: RequestRecord, turn_id: int) -> bool:
        self.check_call()
        if record.status in (RequestStatus.NEW, RequestStatus.CLOSED):
            raise InvalidCall(f"there is no turn to cancel: the request is {record.status.value}")
        if not record.has_turn or turn_id != record.turn_id:
            return False
        self.finish_turn(record, FinishReason.CANCELLED)
        return True

    def set_draft_tokens(self, record: RequestRecord, tokens: Sequence[int]) -> None:
        self.check_call()
        if self.fatal is not None:
            raise self.fatal.with_traceback(None)
        if record.status is RequestStatus.CLOSED:
            raise InvalidCall("a closed request cannot propose drafts")
        self._check_own(record)
        drafts = self._checked_ids(tokens)
        if drafts:
            self._check_can_draft(record, len(drafts))
        record.drafts = tuple(drafts)

    def rewind(self, record: RequestRecord, length: int) -> None:
        self.check_call()
        if record.status is not RequestStatus.IDLE or record.pending_events:
            raise InvalidCall("rewind needs a complete turn whose events are drained")
        if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= record.history.length:
            raise InvalidOption("length", length, f"an integer from 0 to {record.history.length}")
        if length == record.history.length:
            return
        if length == 0:
            if self.cache.table(record.id) is not None:
                self.cache.remove(record.id)
            record.num_computed_tokens = 0
        elif self.cache.table(record.id) is not None:
            record.num_computed_tokens = self.cache.truncate(record.id, length)
        record.history.truncate(length)

    def fork(self, record: RequestRecord, length: int | None = None) -> Request:
        self.check_call()
        if record.status not in (RequestStatus.RUNNING, RequestStatus.IDLE):
            raise InvalidCall(f"a request that is {record.status.value} cannot be forked")
        if record.num_computed_tokens == 0:
            raise InvalidCall("a request of which nothing was computed cannot be forked")
        length = record.history.length if length is None else length
        require_integer("length", length, 1, record.history.length)
        if self.cache.resident_count >= self.cache.max_residents:
            raise InvalidCall(f"{self.cache.max_residents} requests own memory already; close one first")
        child = self.create(record.options)
        twin = child._record
        twin.history.extend(record.history.ids[:length])
        # The last token of the child is computed again, so that its logits exist (F346).
        twin.num_computed_tokens = min(record.num_computed_tokens, length - 1)
        if twin.num_computed_tokens:
            twin.num_computed_tokens = self.cache.fork(record.id, twin.id, twin.num_computed_tokens)
            self.requests.settle(twin)
        twin.status = RequestStatus.IDLE
        return child

    def close(self, record: RequestRecord) -> None:
        self.check_call()
        if record.status is RequestStatus.CLOSED:
            return
        self._check_own(record)
        self._discard(record)

    # -- ends of turns --------------------------------------------------------------------------------------------

    def finish_turn(
        self, record: RequestRecord, reason: FinishReason, error_code: int = ErrorCode.NONE, message: str = ""
    ) -> None:
        """Ends a turn outside a step's commit, keeping all that was committed, with its one terminal event."""
        self.requests.rest(record)
        record.drafts = ()
        record.grammar_cursor = None
        record.status = RequestStatus.IDLE
        record.finish_reason = reason
        flags = EventFlags.TURN_FINISHED
        if reason is FinishReason.FAILED:
            flags |= EventFlags.FAILED
        self.events.append(
            EngineEvent(
                flags,
                record,
                record.turn_id,
                finish_reason=reason,
                usage=record.usage(),
                error_code=error_code,
                message=message,
            )
        )

    def stop(self, error: EngineUnhealthy) -> bool:
        """Fail-stop: the first error is kept for every later call, and every running or waiting turn ends as failed.
        Returns whether there was one (F175, F177)."""
        if self.fatal is None:
            self.fatal = error
        affected = self.requests.with_turns()
        for record in affected:
            self.finish_turn(record, FinishReason.FAILED, ErrorCode.FATAL, str(error))
        return bool(affected)

    def preempt(self, record: RequestRecord) -> None:
        """Takes the memory of a running request; its tokens stay, and it is computed again from the queue's front."""
        self.cache.remove(record.id)
        record.num_computed_tokens = 0
        record.drafts = ()
        record.prompt_boundary = record.history.length
        record.status = RequestStatus.WAITING
        record.preemptions += 1
        record.match_cache = None
        self.requests.wait(record, first=True)

    def note_abandonment(self) -> None:
        """The last handle of some request was dropped. Safe on any thread."""
        self.abandonment_pending = True

    def reclaim_abandoned(self) -> None:
        """Closes requests whose last handle was dropped. Without one this reads a flag and nothing else (F043)."""
        if not self.abandonment_pending:
            return
        self.abandonment_pending = False
        for record in [record for record in self.requests.records.values() if record.abandoned]:
            self._discard(record)

    def detach_all(self) -> None:
        """The engine goes away: every request is closed, surviving handles are tombstones (F045)."""
        for record in list(self.requests.records.values()):
            self._discard(record)

    # -- parts ----------------------------------------------------------------------------------------------------

    def _checked_ids(self, tokens: Sequence[int]) -> list[int]:
        try:
            ids = [operator.index(token) for token in tokens]
        except TypeError:
            raise InvalidOption("tokens", tokens, "integers") from None
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            wrong = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise InvalidOption("tokens", wrong, f"token ids from 0 to {self.vocab_size - 1}")
        return ids

    def _check_can_draft(self, record: RequestRecord, count: int) -> None:
        """Drafts are compared with the likeliest token, so nothing else may decide what comes next (F296)."""
        options = record.turn_options
        if not self.max_draft_tokens:
            raise InvalidCall("this decoder verifies no drafts")
        if count > self.max_draft_tokens:
            raise InvalidOption("tokens", count, f"at most {self.max_draft_tokens} drafts")
        if record.status is not RequestStatus.RUNNING or record.is_prefill:
            raise InvalidCall("drafts need a turn whose prompt is processed and that still generates")
        if not options.sampling.greedy or options.sampling.reshapes or options.grammar is not None:
            raise InvalidCall("drafts need greedy decoding without penalties, biases and a grammar")
        if record.turn_generated < options.min_generated_tokens:
            raise InvalidCall(f"drafts need {options.min_generated_tokens} generated tokens, the turn's minimum")

    def _checked_tokens(self, record: RequestRecord, tokens: Sequence[int]) -> list[int]:
        added = self._checked_ids(tokens)
        if not added:
            raise InvalidOption("tokens", [], "at least one token")
        if len(added) >= record.max_total - record.history.length:
            raise ContextLengthExceeded(record.history.length, len(added), record.max_total)
        return added

    def _check_options(self, record: RequestRecord, added: int, options: TurnOptions) -> None:
        length = record.history.length + added
        if options.resumed_tokens >= length:
            raise InvalidOption("resumed_tokens", options.resumed_tokens, f"less than the {length} tokens given")
        room = record.max_total - length + options.resumed_tokens
        if options.min_generated_tokens > room:
            raise InvalidOption("min_generated_tokens", options.min_generated_tokens, f"at most {room}, the room left")
        if options.logprobs is not None and options.logprobs > self.vocab_size:
            raise InvalidOption("logprobs", options.logprobs, f"at most {self.vocab_size}")
        named = [*(token for token, _ in options.sampling.logit_bias), *options.stop_token_ids]
        if named and max(named) >= self.vocab_size:
            raise InvalidOption("logit_bias or stop_token_ids", max(named), f"token ids below {self.vocab_size}")

    def _append(self, record: RequestRecord, added: list[int]) -> None:
        """Takes the input in and, for a request without memory, a place in the queue: both or neither (F020)."""
        length = record.history.length
        try:
            if self.cache.table(record.id) is None:
                self.requests.wait(record)
            else:
                self.requests.run(record)
            record.history.extend(added)
        except BaseException:
            self._undo_append(record, length)
            raise

    def _undo_append(self, record: RequestRecord, length: int) -> None:
        try:
            self.requests.rest(record)
            record.history.truncate(length)
        except BaseException as cause:
            # The sequence is no longer known: the request is lost, and the engine cannot vouch for itself (F046).
            error = EngineUnhealthy(f"a failed append could not be undone. Cause: {type(cause).__name__}: {cause}")
            self._discard(record)
            self.stop(error)
            raise error from cause

    def _discard(self, record: RequestRecord) -> None:
        self.events.purge(record)
        self.requests.rest(record)
        if self.cache.owns_memory(record.id):
            self.cache.remove(record.id)
        del self.requests.records[record.id]
        record.status = RequestStatus.CLOSED
        record.history = TokenHistory()
        record.grammar_cursor = None
        record.num_computed_tokens = 0
