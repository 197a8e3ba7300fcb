"""What every store of responses does, whatever process it lives in. A suite names its `store` fixture and inherits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from serve_app.dated_ids import new_id
from serve_app.openai.responses.store import (
    FoundItems,
    History,
    KeptCall,
    KeptItem,
    KeptMessage,
    ResponseStore,
    StoredResponse,
)


def stored(
    previous: StoredResponse | None = None, tenant: str = "o", text: str = "hi", **fields: str
) -> StoredResponse:
    """A new response with an id of its own."""
    response_id = new_id("resp")
    return StoredResponse(
        id=response_id,
        tenant=tenant,
        previous=None if previous is None else previous.id,
        session_id=response_id if previous is None else previous.session_id,
        messages=(KeptMessage("user", text),),
        answer=KeptMessage("assistant", f"re: {text}"),
        shown=fields.get("shown", f'"{response_id}"'),
    )


def with_item(item_id: str, text: str) -> StoredResponse:
    """A new response whose output has this item."""
    return replace(stored(shown=f"[é{text}]"), items=(KeptItem(item_id, 2, 2 + len(text)),))


OLD = {kind: f"{kind}_{'0' * 12}{'a' * 20}" for kind in ("resp", "msg", "fc")}
"""Ids that are older than any store."""

MOST = 2**20
"""Bytes of a conversation: more than any here has."""


def held(store: ResponseStore, running: StoredResponse, cancelled: str = "{}") -> AsyncGenerator[bool, None]:
    return cast(AsyncGenerator[bool, None], store.hold(running, cancelled))


class ResponseStoreConformance:
    async def test_what_was_put_can_be_got(self, store: ResponseStore) -> None:
        response = stored(shown='{"text": "é 😀"}')
        assert await store.get("o", response.id) is None
        await store.put(response)
        assert await store.get("o", response.id) == '{"text": "é 😀"}'

    async def test_history_is_the_chain_from_its_root(self, store: ResponseStore) -> None:
        first = stored(text="a")
        second = stored(first, text="b")
        third = stored(second, text="c")
        for response in (first, second, third):
            await store.put(response)
        history = await store.history("o", third.id, MOST)
        assert history is not None and history.session_id == first.id
        assert [message.role for message in history.messages] == ["user", "assistant"] * 3
        assert [message.text for message in history.messages] == ["a", "re: a", "b", "re: b", "c", "re: c"]
        said = KeptMessage("user", "a"), KeptMessage("assistant", "re: a")
        assert await store.history("o", first.id, MOST) == History(
            first.id, said, sum(message.bytes for message in said)
        )

    async def test_of_a_conversation_that_is_too_large_only_the_size_is_told(self, store: ResponseStore) -> None:
        first = stored(text="x" * 1000)
        await store.put(first)
        whole = await store.history("o", first.id, MOST)
        assert whole is not None and whole.messages
        assert await store.history("o", first.id, whole.bytes) == whole
        assert await store.history("o", first.id, whole.bytes - 1) == replace(whole, messages=())

    async def test_calls_and_their_outputs_are_history(self, store: ResponseStore) -> None:
        calls = KeptCall("call_1", "weather", '{"city": "Zürich"}'), KeptCall("call_2", "now", "{}")
        first = replace(stored(), answer=KeptMessage("assistant", "Let me see.", calls))
        outputs = KeptMessage("tool", "rain", call_id="call_1"), KeptMessage("tool", "noon", call_id="call_2")
        second = replace(stored(first), messages=outputs)
        for response in (first, second):
            await store.put(response)
        history = await store.history("o", second.id, MOST)
        assert history is not None
        assert history.messages == (*first.messages, first.answer, *outputs, second.answer)

    async def test_branches_share_what_is_before_them(self, store: ResponseStore) -> None:
        root = stored(text="a")
        left, right = stored(root, text="left"), stored(root, text="right")
        for response in (root, left, right):
            await store.put(response)
        for branch, text in ((left, "left"), (right, "right")):
            history = await store.history("o", branch.id, MOST)
            assert history is not None
            assert [message.text for message in history.messages] == ["a", "re: a", text, f"re: {text}"]

    async def test_without_one_of_its_chain_a_response_has_no_history(self, store: ResponseStore) -> None:
        first = stored()
        second = stored(first)
        third = stored(second)
        for response in (first, second, third):
            await store.put(response)
        assert await store.delete("o", second.id)
        assert not await store.delete("o", second.id)
        assert await store.history("o", third.id, MOST) is None
        assert await store.history("o", first.id, MOST) is not None
        assert await store.get("o", third.id) is not None

    async def test_what_is_older_than_the_store_was_lost(self, store: ResponseStore) -> None:
        assert [await store.lost("o", some_id) for some_id in OLD.values()] == [True] * 3
        kept, never, of_another_server = stored(), stored(), f"resp_{'f' * 48}"
        await store.put(kept)
        assert not any([await store.lost("o", i) for i in (kept.id, never.id, of_another_server, "resp_1", "")])
        later = stored(kept)
        goes_on_from_lost = replace(later, previous=OLD["resp"])
        await store.put(goes_on_from_lost)
        assert await store.lost("o", later.id)
        await store.put(after_deleted := stored(kept))
        await store.delete("o", kept.id)
        assert await store.history("o", after_deleted.id, MOST) is None
        assert not await store.lost("o", after_deleted.id)

    async def test_another_owner_finds_nothing(self, store: ResponseStore) -> None:
        response, running = stored(), stored()
        await store.put(response)
        async with aclosing(held(store, running)) as holding:
            await anext(holding)
            for found in (response.id, running.id):
                assert await store.get("other", found) is None
                assert await store.history("other", found, MOST) is None
                assert not await store.delete("other", found)
                assert await store.cancel("other", found) is None
        assert await store.get("o", response.id) is not None

    async def test_a_response_in_progress_is_known_while_it_is_held(self, store: ResponseStore) -> None:
        running = stored(shown='{"status": "in_progress"}')
        async with aclosing(held(store, running)) as holding:
            assert await anext(holding) is False
            assert await store.get("o", running.id) == running.shown
            assert await store.history("o", running.id, MOST) is None
        for _ in range(500):  # the end of a call reaches another process a little later
            if await store.get("o", running.id) is None:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it is still known")

    async def test_a_cancelled_response_tells_its_holder(self, store: ResponseStore) -> None:
        running = stored()
        async with aclosing(held(store, running, '{"status": "cancelled"}')) as holding:
            await anext(holding)
            assert await store.cancel("o", running.id) == '{"status": "cancelled"}'
            assert await anext(holding) is True
            assert await store.get("o", running.id) == '{"status": "cancelled"}'
            assert await store.cancel("o", running.id) is None
        final = stored()
        await store.put(final)
        assert await store.cancel("o", final.id) is None

    async def test_items_are_found_by_their_ids_and_gone_with_their_response(self, store: ResponseStore) -> None:
        first, second = with_item("msg_1", '{"é": 1}'), with_item("msg_2", '{"b": 2}')
        for response in (first, second):
            await store.put(response)
        found = await store.items("o", ["msg_2", "msg_1", "msg_2"], MOST)
        size = len('{"b": 2}{"é": 1}{"b": 2}'.encode())
        assert found == FoundItems(('{"b": 2}', '{"é": 1}', '{"b": 2}'), size, session_id=second.session_id)
        assert await store.items("o", ["msg_1"], 8) == FoundItems((), 9, session_id=first.session_id)
        assert await store.items("o", ["msg_1", "msg_3"], MOST) == FoundItems(missing="msg_3")
        assert await store.items("other", ["msg_1"], MOST) == FoundItems(missing="msg_1")
        assert await store.delete("o", first.id)
        assert await store.items("o", ["msg_2", "msg_1"], MOST) == FoundItems(missing="msg_1")
