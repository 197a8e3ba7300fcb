from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from serve_app.commands.tls import TlsFiles, tls_files


def make(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate that signs itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates of this test")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_a_certificate_with_its_key_is_taken_by_its_full_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = make(tmp_path, "a")
    monkeypatch.chdir(tmp_path)
    files = tls_files(Path(cert.name), Path(key.name))
    assert files == TlsFiles(Path(cert.name), Path(key.name))
    assert files.serve_options() == {"ssl_certfile": str(cert), "ssl_keyfile": str(key)}


def test_no_files_no_tls() -> None:
    assert tls_files(None, None) is None


def test_files_that_no_server_could_use_are_refused_by_name(tmp_path: Path) -> None:
    cert, key = make(tmp_path, "a")
    _, other = make(tmp_path, "b")
    for certfile, keyfile in ((cert, None), (None, key), (cert, other), (cert, tmp_path / "none"), (key, key)):
        with pytest.raises(ValueError, match="ssl_certfile"):
            tls_files(certfile, keyfile)


def test_a_key_with_a_password_is_refused_and_not_asked_for(tmp_path: Path) -> None:
    cert, key = make(tmp_path, "a")
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "rsa", "-aes256", "-passout", "pass:secret", "-in", str(key), "-out", str(locked)],
        check=True,
        capture_output=True,
    )
    with pytest.raises(ValueError, match="ssl_keyfile"):
        tls_files(cert, locked)
