"""Bodies that a client has compressed, unpacked up to a bound."""

from __future__ import annotations

import io
import zlib

from serve_app.ingress.errors import ApiError, too_large

ENCODINGS = ("gzip", "deflate", "zstd")
_MOST_MEMBERS = 16  # of gzip: what follows each is copied
_MOST_WINDOW = 8 * 2**20  # bytes that a zstd stream may want to look back; no level of the usual ones wants more
_GZIP, _ZLIB, _RAW = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


def check_encoding(encoding: str) -> None:
    """Raises ApiError 415."""
    if encoding not in ENCODINGS:
        names = ", ".join(ENCODINGS)
        message = (
            f"The body's Content-Encoding '{encoding[:100]}' is not known: send it as it is, or in one of {names}."
        )
        raise ApiError(415, message, code="unsupported_encoding", headers={"Accept-Encoding": names})


def unpacked(data: bytes, encoding: str, limit: int) -> bytes:
    """Raises ApiError: 413 beyond `limit` bytes, of which no more are made; 400 for what is no such stream, or only the
    beginning of one."""
    try:
        content = _zstd(data, limit) if encoding == "zstd" else _deflated(data, encoding, limit)
    except (zlib.error, EOFError, ValueError) as error:
        raise ApiError(400, f"The body is no {encoding}: {error}", code="invalid_encoding") from error
    if len(content) > limit:
        raise too_large(limit)
    return content


def _deflated(data: bytes, encoding: str, limit: int) -> bytes:
    """Several members one after the other are one stream of gzip."""
    content = b""
    for _ in range(_MOST_MEMBERS):
        # Some clients take deflate to be the bare stream, without zlib's two bytes before it.
        bare = encoding == "deflate" and data[:1] and (data[0] & 0x0F != 8 or (data[0] << 8 | (data + b"\0")[1]) % 31)
        stream = zlib.decompressobj(_GZIP if encoding == "gzip" else _RAW if bare else _ZLIB)
        content += stream.decompress(data, limit + 1 - len(content))
        if len(content) > limit:
            return content
        if not stream.eof:
            raise EOFError("it ends before its end")
        data = stream.unused_data
        if not data or encoding != "gzip":
            return content
    raise ValueError(f"it has more than {_MOST_MEMBERS} members")


def _zstd(data: bytes, limit: int) -> bytes:
    import zstandard  # few clients need it

    unpacker = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
    try:
        with unpacker.stream_reader(io.BytesIO(data), read_across_frames=True) as stream:
            return stream.read(limit + 1)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
