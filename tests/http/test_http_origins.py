"""What web pages may do with a server on their reader's machine, with keys and without."""

from __future__ import annotations

import httpx
import pytest
from pydantic import ValidationError

from serve_app.config import AppArgs
from serve_app.ingress.settings import IngressSettings
from tests.http.http_harness import CHAT, Server, StartServer, error_of

BODY = {"messages": [{"role": "user", "content": "Hi"}]}
PAGE = "https://chat.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
KEY = {"authorization": "Bearer key-of-somebody"}


def asked(server: Server, **headers: str) -> httpx.Response:
    return server.client.post(CHAT, json=BODY, headers=headers)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.1.2.3", "[::1]:8000", "a.localhost."]
)
def test_names_of_this_machine_are_served(server: Server, host: str) -> None:
    assert asked(server, host=host).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "10.0.0.1",
        "[2001:db8::1]:80",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "0.0.0.0",
        "",
    ],
)
def test_other_names_are_not_whatever_they_point_at(server: Server, host: str) -> None:
    for path in ("/health", "/v1/models", "/openapi.json", "/nothing"):
        refused = server.client.get(path, headers={"host": host})
        error = error_of(refused)
        assert (refused.status_code, error["code"]) == (403, "host_not_allowed")
        assert "allowed_hosts" in error["message"]
    assert asked(server, host=host).status_code == 403
    assert server.engine.requests == []


def test_a_name_that_the_operator_lists_is_served(start_server: StartServer) -> None:
    server = start_server(allowed_hosts=("Chat.Example",))
    assert asked(server, host="chat.example:8443").status_code == 200
    assert asked(server, host="other.example").status_code == 403
    assert asked(start_server(allowed_hosts="*"), host="other.example").status_code == 200


@pytest.mark.parametrize("origin", [PAGE, "http://localhost:3000", "null", "http://evil.example:1", "localhost", ""])
def test_pages_of_other_origins_are_refused(server: Server, origin: str) -> None:
    for refused in (
        asked(server, origin=origin),
        server.client.post("/v1/responses/x/cancel", headers={"origin": origin}),
    ):
        error = error_of(refused)
        assert (refused.status_code, error["code"]) == (403, "origin_not_allowed")
        assert "allowed_origins" in error["message"]
        assert "access-control-allow-origin" not in refused.headers
    preflight = server.client.options(CHAT, headers={"origin": origin, **PREFLIGHT})
    assert preflight.status_code == 403 and "access-control-allow-origin" not in preflight.headers
    assert server.engine.requests == []


def test_pages_of_the_server_itself_are_its_own(server: Server) -> None:
    assert asked(server, origin=server.url).status_code == 200
    assert asked(server, origin=server.url.replace("127.0.0.1", "localhost")).status_code == 403


@pytest.mark.parametrize("keys", [(), ("key-of-somebody",)])
@pytest.mark.parametrize("listed", [(PAGE, "http://localhost:3000"), ("*",)])
def test_a_page_that_the_operator_lists_is_let_in(
    start_server: StartServer, keys: tuple[str, ...], listed: tuple[str, ...]
) -> None:
    server = start_server(api_keys=keys, allowed_origins=listed)
    preflight = server.client.options(CHAT, headers={"origin": PAGE, **PREFLIGHT})
    assert preflight.status_code == 200  # browsers send no key with it
    shown = preflight.headers
    assert shown["access-control-allow-origin"] in (PAGE, "*")
    assert "POST" in shown["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= set(shown["access-control-allow-headers"].lower().split(","))
    for answer in (asked(server, origin=PAGE, **KEY), server.client.get("/nothing", headers={"origin": PAGE, **KEY})):
        assert answer.status_code in (200, 404)
        assert answer.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "x-moorage-replica" in answer.headers["access-control-expose-headers"]
        assert answer.headers["x-request-id"]
    if keys:
        refused = asked(server, origin=PAGE)
        assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
        assert refused.headers["access-control-allow-origin"] in (PAGE, "*")


def test_a_preflight_of_a_method_that_is_not_served_is_refused_in_the_envelope(start_server: StartServer) -> None:
    server = start_server(allowed_origins=(PAGE,))
    headers = {"origin": PAGE, "access-control-request-method": "TRACE"}
    refused = server.client.options(CHAT, headers=headers)
    assert (refused.status_code, error_of(refused)["code"]) == (405, "method_not_allowed")


def test_with_keys_a_page_that_is_not_listed_learns_nothing_but_a_client_with_a_key_is_served(
    start_server: StartServer,
) -> None:
    server = start_server(api_keys=("key-of-somebody",))
    preflight = server.client.options(CHAT, headers={"origin": PAGE, **PREFLIGHT})
    assert preflight.status_code == 401 and "access-control-allow-origin" not in preflight.headers
    answer = asked(server, host="chat.example", origin=PAGE, **KEY)
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("value", ["https://a.example/x", "a.example", "https://", "a b", ["https://a.example", "b"]])
def test_what_is_no_origin_is_refused_by_its_field(value: object) -> None:
    with pytest.raises(ValidationError, match="no origin"):
        IngressSettings(model_ids=("m",), allowed_origins=value)


@pytest.mark.parametrize("value", ["https://a.example", "a/b", "a b"])
def test_what_is_no_host_is_refused_by_its_field(value: str) -> None:
    with pytest.raises(ValidationError, match="no name of a host"):
        IngressSettings(model_ids=("m",), allowed_hosts=(value,))


def test_text_may_list_several() -> None:
    args = AppArgs.model_validate({"model": "m", "allowed_origins": "https://a.example/, app://obsidian.md"})
    assert args.allowed_origins == ("https://a.example", "app://obsidian.md")
    assert AppArgs.model_validate({"model": "m", "allowed_hosts": "A.example,b"}).allowed_hosts == ("a.example", "b")
