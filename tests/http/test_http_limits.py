"""How many turns may be open, and what a salt keeps apart."""

from __future__ import annotations

import socket

import pytest

from engine_actor.messages import RefusalCode, SessionInfo, TurnRefused
from serve_app.ingress.errors import ApiError
from serve_app.ingress.settings import IngressSettings
from serve_app.ingress.turn_slots import TurnSlots
from tests.http.http_harness import CHAT, RESPONSES, Server, StartServer, error_of, open_request, wait_until

ONE, TWO = ({"authorization": f"Bearer key-{name}"} for name in ("one", "two"))
CHAT_BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


def keep_open(server: Server, turns: int, headers: dict[str, str] | None = None) -> list[socket.socket]:
    """So many turns that are accepted and wait for `release`."""
    server.engine.hold_at = 1
    before = server.engine.running
    opened = [open_request(server, CHAT, CHAT_BODY, headers=headers) for _ in range(turns)]
    wait_until(lambda: server.engine.running == before + turns)
    return opened


def test_beyond_the_servers_limit_is_429_until_somebody_leaves(start_server: StartServer) -> None:
    server = start_server(max_turns=3)
    opened = keep_open(server, 3)
    for send in (server.chat, server.complete, server.respond):
        refused = send("x")
        error = error_of(refused)
        assert (refused.status_code, error["code"], error["type"]) == (429, "server_busy", "rate_limit_error")
        assert refused.headers["retry-after"] == "1"
        path = refused.request.url.path
        unread = server.client.post(path, content=b"no JSON at all")  # it is not worth reading
        assert error_of(unread)["code"] == "server_busy"
    assert len(server.engine.requests) == 3
    opened.pop().close()
    wait_until(lambda: server.engine.closed == 1)
    server.engine.release.set()
    assert server.chat().status_code == 200
    for connection in opened:
        connection.close()


def test_one_key_can_not_take_the_places_of_another(start_server: StartServer) -> None:
    server = start_server(api_keys=("key-one", "key-two"), max_turns_per_key=2)
    opened = keep_open(server, 2, headers=ONE)
    refused = server.chat(headers=ONE, cache_salt="another salt is no other key")
    assert (refused.status_code, error_of(refused)["code"]) == (429, "too_many_turns")
    assert "retry-after" in refused.headers
    server.engine.hold_at = None
    assert server.chat(headers=TWO).status_code == 200
    server.engine.release.set()
    for connection in opened:
        connection.close()
    wait_until(lambda: server.engine.running == 0)
    assert server.chat(headers=ONE).status_code == 200


def test_turns_that_end_in_any_way_leave_their_place(start_server: StartServer) -> None:
    server = start_server(max_turns=1)
    engine = server.engine
    for _ in range(2):
        assert server.chat().status_code == 200
        assert server.chat(stream=True).status_code == 200
        assert server.chat(stop="there").status_code == 200
        engine.failed = "x"
        assert server.chat().status_code == 500
        engine.failed = None
        engine.fail_at = 2
        assert server.chat(stream=True).status_code == 200
        engine.fail_at = 0
        assert server.chat().status_code == 500
        engine.fail_at = None
        engine.refusal = TurnRefused(RefusalCode.QUEUE_FULL, "full")
        assert error_of(server.chat())["code"] == "queue_full"
        engine.refusal = None
        assert server.respond().status_code == 200
        assert server.chat(temperature=5).status_code == 400


def test_other_routes_need_no_place(start_server: StartServer) -> None:
    server = start_server(max_turns=1)
    (connection,) = keep_open(server, 1)
    assert server.client.get("/v1/models").status_code == 200
    assert server.post("/tokenize", {"prompt": "a"}).status_code == 200
    assert server.client.get(f"{RESPONSES}/resp_x").status_code == 404
    connection.close()


def test_slots_are_counted_from_those_that_are_open() -> None:
    slots = TurnSlots(IngressSettings(model_ids=("m",), max_turns=3, max_turns_per_key=2))
    with slots.occupy("a"), slots.occupy("a"):
        with pytest.raises(ApiError, match="2 turns of this key"), slots.occupy("a"):
            pass
        with slots.occupy("b"):
            assert slots.open_turns() == {"a": 2, "b": 1}
            with pytest.raises(ApiError, match="as many turns"), slots.occupy("c"):
                pass
        with pytest.raises(ZeroDivisionError), slots.occupy("b"):
            raise ZeroDivisionError
    assert slots.open_turns() == {}


def test_salts_keep_sessions_prefixes_and_routes_apart(server: Server) -> None:
    for salt in (None, "", "a", "a", "b"):
        assert server.chat(headers={"x-session-id": "same"}, cache_salt=salt).status_code == 200
    requests = server.engine.requests
    none, empty, first, again, other = (request.cache_scope for request in requests)
    assert none == empty == "public"
    assert first == again and len({none, first, other}) == 3
    assert not any(owner.endswith(("/a", "/b")) for owner in (first, other))
    assert [request.session_id for request in requests] == ["same"] * 5
    routes = server.engine.routing_keys
    assert routes[0] == routes[1] and routes[2] == routes[3] and len(set(routes)) == 3


def test_salts_count_for_anonymous_requests_and_completions_too(server: Server) -> None:
    for salt in ("a", "b"):
        server.chat(cache_salt=salt)
        server.complete(cache_salt=salt)
        server.respond(cache_salt=salt, store=False)
    assert len(set(server.engine.routing_keys)) == 4  # a chat and a response that open alike go the same way
    assert len({request.cache_scope for request in server.engine.requests}) == 2


def test_a_salted_session_is_found_with_its_salt(server: Server) -> None:
    server.chat(cache_salt="pepper & salt")
    owner = server.engine.requests[0].cache_scope
    server.engine.known_sessions = [SessionInfo("s", owner, "r", 10, 8, 1, False, 2.0)]
    asked = {"cache_salt": "pepper & salt"}
    assert server.client.get("/v1/sessions").json()["data"] == []
    assert len(server.client.get("/v1/sessions", params=asked).json()["data"]) == 1
    assert server.client.get("/v1/sessions/s", params=asked).json()["tokens"] == 10
    assert server.client.get("/v1/sessions/s").status_code == 404
    assert server.client.delete("/v1/sessions/s").status_code == 404
    assert server.client.delete("/v1/sessions/s", params=asked).status_code == 200


def test_a_session_is_shown_by_its_name_and_only_to_its_tenant(server: Server) -> None:
    server.engine.known_sessions = [
        SessionInfo("a/b", "public", "new", 120, 112, 7, False, 1.0),
        SessionInfo("a", "public", "old", 5, 5, 1, False, 0.5),
        SessionInfo("a/b", "other", "old", 5, 5, 1, False, 0.5),
    ]
    content = server.client.get("/v1/sessions/a%2Fb").json()
    assert content == {
        "id": "a/b",
        "object": "session",
        "replica": "new",
        "tokens": 120,
        "cached_tokens": 112,
        "blocks": 7,
        "running": False,
        "idle_seconds": 1.0,
    }
    missing = server.client.get("/v1/sessions/b")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "session_not_found")
