from __future__ import annotations

from unittest.mock import Mock

import pytest
from pydantic import ValidationError

from engine_actor.messages import SessionInfo
from serve_app.ingress.auth import ApiKeys
from serve_app.ingress.settings import IngressSettings
from tests.http.http_harness import CHAT, MODEL, Server, StartServer, error_of

KEYS = ("first-key", "second key/with=signs")


@pytest.fixture
def locked(start_server: StartServer) -> Server:
    return start_server(api_keys=KEYS)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/sessions"),
        ("DELETE", "/v1/sessions/a"), ("GET", "/openapi.json"), ("GET", "/nothing"),
        ("GET", "/health/"), ("GET", "//health"), ("PUT", CHAT), ("OPTIONS", CHAT),
    ],
)  # fmt: skip
def test_every_path_but_health_and_ready_wants_a_key(locked: Server, method: str, path: str) -> None:
    response = locked.client.request(method, path)
    assert response.status_code == 401
    error = error_of(response)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]
    assert locked.engine.requests == []


@pytest.mark.parametrize("path", ["/health", "/ready"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_who_watches_needs_no_key(locked: Server, method: str, path: str) -> None:
    assert locked.client.request(method, path).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        b"", b"Bearer", b"first-key", b"Basic first-key", b"Bearer first-ke", b"Bearer first-keyy",
        b"Bearer FIRST-KEY", b"Bearer first-key,second", b"Bearer " + b"x" * 30_000, b"Bearer \xff\xfe",
        b"Token first-key",
    ],
)  # fmt: skip
def test_anything_else_is_refused(locked: Server, value: bytes) -> None:
    response = locked.client.get("/v1/models", headers=[(b"authorization", value)])
    assert response.status_code == 401
    assert "first-key" not in response.text


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_each_key_opens(locked: Server, key: str, scheme: str) -> None:
    assert locked.chat(headers={"Authorization": f"{scheme} {key}"}).status_code == 200


def test_owners_differ_by_key_and_do_not_tell_it(locked: Server, server: Server) -> None:
    for key in (*KEYS, KEYS[0]):
        locked.chat(headers=bearer(key) | {"x-session-id": "same"})
    owners = [request.cache_scope for request in locked.engine.requests]
    assert owners[0] == owners[2] != owners[1]
    assert not any(key in owner for key in KEYS for owner in owners)
    routes = locked.engine.routing_keys
    assert routes[0] == routes[2] != routes[1]
    server.chat()
    assert server.engine.requests[0].cache_scope == "public"


def test_hints_are_bound_to_the_owner_too(locked: Server) -> None:
    for key in KEYS:
        locked.chat("the same opening", headers=bearer(key))
    assert len(set(locked.engine.routing_keys)) == 2


def test_one_owner_sees_and_drops_only_its_own_sessions(locked: Server) -> None:
    for key in KEYS:
        locked.chat(headers=bearer(key))
    owners = [request.cache_scope for request in locked.engine.requests]
    locked.engine.known_sessions = [SessionInfo(f"of-{i}", o, "r", 10, 8, 1, False, 2.0) for i, o in enumerate(owners)]
    for i, key in enumerate(KEYS):
        listed = locked.client.get("/v1/sessions", headers=bearer(key)).json()["data"]
        assert [session["id"] for session in listed] == [f"of-{i}"]
    assert locked.client.delete("/v1/sessions/of-1", headers=bearer(KEYS[0])).status_code == 404
    assert locked.client.delete("/v1/sessions/of-0", headers=bearer(KEYS[0])).status_code == 200


@pytest.mark.parametrize("keys", [("",), (" a",), ("a\n",), ("ä",), ("ok", "\x00")])
def test_keys_that_no_client_could_send_are_refused_at_start(keys: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match="api_keys") as refused:
        IngressSettings(model_ids=(MODEL,), api_keys=keys)
    assert "input_value" not in str(refused.value)


def test_keys_are_not_shown() -> None:
    assert "first" not in repr(IngressSettings(model_ids=(MODEL,), api_keys=KEYS))


def test_all_keys_are_compared_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import hmac

    compare = Mock(wraps=hmac.compare_digest)
    monkeypatch.setattr(hmac, "compare_digest", compare)
    keys = ApiKeys(["a", "b", "c"])
    assert keys.tenant("a") is not None
    assert compare.call_count == 3
