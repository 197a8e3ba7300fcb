"""Compressed bodies."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable

import pytest
import zstandard

from tests.http.http_harness import CHAT, COMPLETIONS, RESPONSES, Server, StartServer, error_of

Pack = Callable[[bytes], bytes]


def bare_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def in_two(pack: Pack) -> Pack:
    return lambda data: pack(data[:5]) + pack(data[5:])


WAYS: list[tuple[str, Pack]] = [
    ("identity", bytes),
    ("gzip", gzip.compress),
    ("x-gzip", in_two(gzip.compress)),
    ("deflate", zlib.compress),
    ("deflate", bare_deflate),
    ("zstd", zstandard.compress),
    ("Zstd", in_two(zstandard.compress)),
]
PACKED = WAYS[1:]


@pytest.mark.parametrize(("encoding", "pack"), WAYS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_a_packed_body_is_what_is_in_it(server: Server, path: str, encoding: str, pack: Pack) -> None:
    text = "Größe 中文 😀"
    asked: dict[str, object] = {"messages": [{"role": "user", "content": text}], "prompt": text, "input": text}
    name = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}[path]
    body = json.dumps({name: asked[name]}).encode()
    for content, headers in ((body, {}), (pack(body), {"content-encoding": encoding})):
        assert server.client.post(path, content=content, headers=headers).status_code == 200
    plain, packed = server.engine.requests
    assert plain.prompt_ids == packed.prompt_ids


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
def test_the_bound_is_that_of_what_comes_out(start_server: StartServer, encoding: str, pack: Pack) -> None:
    server = start_server(max_body_bytes=4096)
    body = b'{"prompt": "Hi", "padding": ""}'
    fitting = body.replace(b'""', b'"' + b"x" * (4096 - len(body)) + b'"')
    headers = {"content-encoding": encoding}
    assert server.client.post(COMPLETIONS, content=pack(fitting), headers=headers).status_code == 200
    for large in (fitting + b" ", fitting + b" " * 4_000_000):
        refused = server.client.post(COMPLETIONS, content=pack(large), headers=headers)
        assert (refused.status_code, error_of(refused)["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
def test_what_is_no_such_stream_is_a_400(server: Server, encoding: str, pack: Pack) -> None:
    body = json.dumps({"prompt": "Hi " * 50}).encode()
    for broken in (b"", body, pack(body)[:-3], pack(body)[: len(pack(body)) // 2], b"\0" + pack(body)):
        refused = server.client.post(COMPLETIONS, content=broken, headers={"content-encoding": encoding})
        assert refused.status_code == 400
        assert error_of(refused)["code"] in ("invalid_encoding", "invalid_json")
    assert server.engine.requests == []


@pytest.mark.parametrize("encoding", ["br", "compress", "gzip, gzip", "identity, gzip", "none", "é"])
def test_another_encoding_is_a_415_that_names_those_that_are_known(server: Server, encoding: str) -> None:
    refused = server.client.post(COMPLETIONS, content=b"{}", headers={b"content-encoding": encoding.encode()})
    assert (refused.status_code, error_of(refused)["code"]) == (415, "unsupported_encoding")
    assert refused.headers["accept-encoding"] == "gzip, deflate, zstd"


def test_a_stream_that_wants_to_look_far_back_or_begins_again_and_again_is_refused(server: Server) -> None:
    body = b'{"prompt": "Hi"}'
    parameters = zstandard.ZstdCompressionParameters(window_log=27, compression_level=1)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    far = packer.compress(body) + packer.flush()
    again = b"".join(gzip.compress(body[i : i + 1]) for i in range(len(body))) + gzip.compress(b" ") * 10
    for encoding, data in (("zstd", far), ("gzip", again)):
        refused = server.client.post(COMPLETIONS, content=data, headers={"content-encoding": encoding})
        assert (refused.status_code, error_of(refused)["code"]) == (400, "invalid_encoding")
