"""Which conversation a request belongs to, and where it is sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine_actor.messages import ForkOutcome, SessionInfo
from tests.http.http_harness import Server, StartServer, error_of


def session(server: Server, headers: dict[str, str] | None = None, **fields: Any) -> str | None:
    response = server.chat(headers=headers, **fields)
    assert response.status_code == 200, response.text
    return server.engine.requests[-1].session_id


@pytest.mark.parametrize("name", ["x-session-id", "X-Session-Id", "X_SESSION_ID", "x-session_id"])
def test_the_header_names_the_session(server: Server, name: str) -> None:
    assert session(server, {name: "chat 7/a"}) == "chat 7/a"


def test_the_headers_name_can_be_chosen(start_server: StartServer) -> None:
    server = start_server(session_header="X-Conversation_Key")
    assert session(server, {"x-conversation-key": "a"}) == "a"
    assert session(server, {"x-session-id": "a"}) is None


def test_the_body_names_the_session_where_no_header_does(server: Server) -> None:
    assert session(server, session_id="körper") == "körper"
    assert session(server, {"x-session-id": "head"}, session_id="body") == "head"
    assert session(server) is None
    server.complete(session_id="of a completion")
    assert server.engine.requests[-1].session_id == "of a completion"


@pytest.mark.parametrize("value", [b"", b"x" * 257, b"x" * 30_000, b"a\x09b", b"a\xa0b"])
def test_a_bad_header_is_refused_by_name(server: Server, value: bytes) -> None:
    response = server.client.post("/v1/completions", json={"prompt": "x"}, headers=[(b"x-session-id", value)])
    assert response.status_code == 400
    assert error_of(response)["param"] == "x-session-id"
    assert server.engine.requests == []


def routes(server: Server, *requests: dict[str, Any]) -> list[str | None]:
    before = len(server.engine.routing_keys)
    for request in requests:
        assert server.chat(**request).status_code == 200
    return server.engine.routing_keys[before:]


def test_a_session_goes_home_whatever_it_says(server: Server) -> None:
    head = {"x-session-id": "a"}
    first, second, third, other = routes(
        server,
        {"text": "one", "headers": head},
        {"text": "two", "headers": head, "user": "u"},
        {"text": "three", "session_id": "a"},
        {"text": "one", "headers": {"x-session-id": "b"}},
    )
    assert first == second == third != other


def test_anonymous_turns_of_one_conversation_have_one_hint(server: Server) -> None:
    def grown(first: str, *more: str) -> dict[str, Any]:
        roles = ["user", "assistant"]
        texts = [first, *more]
        return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}

    one, two, other = routes(server, grown("Hi"), grown("Hi", "Hello", "more"), grown("Ho", "Hello", "more"))
    assert one == two != other
    assert all(request.session_id is None for request in server.engine.requests)


def test_a_system_message_and_the_model_are_part_of_the_opening(server: Server) -> None:
    def under(system: str, **more: Any) -> dict[str, Any]:
        return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}], **more}

    assert len(set(routes(server, under("a"), under("b"), under("a", model="alias")))) == 3


def test_user_and_correlation_id_are_hints_only(server: Server) -> None:
    by_user = routes(server, {"text": "a", "user": "u"}, {"text": "b", "user": "u"}, {"text": "a", "user": "v"})
    assert by_user[0] == by_user[1] != by_user[2]
    head = {"x-correlation-id": "c"}
    by_id = routes(server, {"text": "a", "headers": head, "user": "u"}, {"text": "b", "headers": head, "user": "v"})
    assert by_id[0] == by_id[1]
    assert by_id[0] not in by_user
    assert all(request.session_id is None for request in server.engine.requests)


def test_a_hint_can_not_reach_a_session_of_the_same_name(server: Server) -> None:
    found = routes(
        server,
        {"headers": {"x-session-id": "same"}},
        {"user": "same"},
        {"headers": {"x-correlation-id": "same"}},
    )
    assert len(set(found)) == 3
    assert not any("same" in str(route) for route in found)


def test_completions_that_begin_alike_have_one_hint(server: Server) -> None:
    long = "Once upon a time " * 20
    for prompt in (long, long + "there was", "Else", [1] * 64, [1] * 64 + [2]):
        assert server.complete(prompt).status_code == 200
    a, b, c, d, e = server.engine.routing_keys
    assert a == b and d == e and len({a, c, d}) == 3


def test_sessions_are_listed(server: Server) -> None:
    nothing = {"object": "list", "data": [], "incomplete": False, "unanswered_replicas": 0}
    assert server.client.get("/v1/sessions").json() == nothing
    server.engine.known_sessions = [SessionInfo("a/b", "public", "replica-2", 120, 96, 6, False, 1.23456)]
    assert server.client.get("/v1/sessions").json()["data"] == [
        {
            "id": "a/b",
            "object": "session",
            "replica": "replica-2",
            "tokens": 120,
            "cached_tokens": 96,
            "blocks": 6,
            "running": False,
            "idle_seconds": 1.235,
        }
    ]


def test_while_replicas_do_not_answer_the_list_says_so_and_nobody_is_told_that_there_is_no_session(
    server: Server,
) -> None:
    server.engine.known_sessions = [SessionInfo("a", "public", "r", 1, 1, 1, False, 0.0)]
    server.engine.unanswered = 2
    server.engine.fork_outcome = ForkOutcome.UNANSWERED
    listed = server.client.get("/v1/sessions").json()
    assert (listed["incomplete"], listed["unanswered_replicas"]) == (True, 2)
    assert [item["id"] for item in listed["data"]] == ["a"]
    assert server.client.get("/v1/sessions/a").status_code == 200
    refused = [
        server.client.get("/v1/sessions/b"),
        server.client.delete("/v1/sessions/b"),
        server.client.post("/v1/sessions/a/fork", json={"session_id": "c"}),
    ]
    for response in refused:
        assert (response.status_code, error_of(response)["code"]) == (503, "unavailable")
        assert response.headers["retry-after"] == "1"
    assert server.client.delete("/v1/sessions/a").status_code == 200


def test_a_session_is_deleted_once(server: Server) -> None:
    server.engine.known_sessions = [SessionInfo("a/b é", "public", "r", 1, 1, 1, False, 0.0)]
    response = server.client.delete("/v1/sessions/a%2Fb%20%C3%A9")
    assert response.json() == {"id": "a/b é", "object": "session.deleted", "deleted": True}
    server.engine.known_sessions = []
    response = server.client.delete("/v1/sessions/a%2Fb%20%C3%A9")
    assert response.status_code == 404
    assert error_of(response)["code"] == "session_not_found"
    assert server.engine.session_calls == [("public", "a/b é")] * 2


@pytest.mark.parametrize("path", ["a%09b", "x" * 257, "%00", ""])
def test_an_id_that_no_session_can_have_is_refused(server: Server, path: str) -> None:
    response = server.client.delete(f"/v1/sessions/{path}")
    assert response.status_code == 400
    assert error_of(response)["param"] == "session_id"
    assert server.engine.session_calls == []


def test_a_session_is_forked(server: Server) -> None:
    response = server.client.post("/v1/sessions/a%2Fb%20%C3%A9/fork", json={"session_id": "c"})
    assert response.json() == {"id": "c", "object": "session.forked", "forked_from": "a/b é"}
    assert server.engine.fork_calls == [("public", "a/b é", "c")]
    server.client.post("/v1/sessions/a/fork?cache_salt=x", json={"session_id": "c"})
    assert server.engine.fork_calls[-1][0] != "public"


@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        (ForkOutcome.UNKNOWN, 404, "session_not_found"),
        (ForkOutcome.RUNNING, 409, "session_running"),
        (ForkOutcome.EXISTS, 409, "session_exists"),
    ],
)
def test_a_session_that_can_not_be_forked(server: Server, outcome: ForkOutcome, status: int, code: str) -> None:
    server.engine.fork_outcome = outcome
    response = server.client.post("/v1/sessions/a/fork", json={"session_id": "b"})
    assert (response.status_code, error_of(response)["code"]) == (status, code)


@pytest.mark.parametrize("value", [None, 5, True, [], {}, "", "a\nb", "x" * 257, "\ud800", "\x00"])
def test_a_bad_name_of_a_fork_is_refused(server: Server, value: Any) -> None:
    body = json.dumps({"session_id": value}).encode()
    for path, content in (("a", body), ("a", b"{}"), ("a%00", b'{"session_id": "b"}'), ("a", b"[]")):
        response = server.client.post(f"/v1/sessions/{path}/fork", content=content)
        assert response.status_code == 400
        assert error_of(response)["param"] in ("session_id", None)
    assert server.engine.fork_calls == []
