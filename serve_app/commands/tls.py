"""TLS at the server itself, for those who have no proxy in front that does it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate chain and its key, both PEM; the key has no password."""

    certfile: Path
    keyfile: Path

    def serve_options(self) -> dict[str, str]:
        """For Serve's `http_options`. The proxies of a cluster have other working directories."""
        return {"ssl_certfile": str(self.certfile.resolve()), "ssl_keyfile": str(self.keyfile.resolve())}


def tls_files(certfile: Path | None, keyfile: Path | None) -> TlsFiles | None:
    """None without any. Raises ValueError for one without the other, and for files that no server could use."""
    if certfile is None and keyfile is None:
        return None
    if certfile is None or keyfile is None:
        raise ValueError("ssl_certfile and ssl_keyfile are only of use together")
    try:
        # The empty password keeps a protected key from asking on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ValueError(f"ssl_certfile {str(certfile)!r} with ssl_keyfile {str(keyfile)!r}: {error}") from error
    return TlsFiles(certfile, keyfile)
