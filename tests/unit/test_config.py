from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from serve_app.config import AppArgs, describe_errors
from serve_app.config_table import groups, markdown
from serve_app.config_values import parse_memory
from serve_app.ingress.settings import IngressSettings, SamplingDefaults


@pytest.mark.parametrize(
    ("given", "expected"),
    [("0.3", 0.3), (0.5, 0.5), ("2GiB", 2 * 2**30), ("512 MB", 512e6), (1 << 30, 2**30), (" 1kib ", 1024), (1, 1)],
)
def test_memory_is_read_as_a_share_or_as_bytes(given: object, expected: float) -> None:
    assert parse_memory(given) == expected


@pytest.mark.parametrize("given", ["", "lots", "-1", "2XiB", 0, True, None, "0", "nan", "1e3", float("inf"), "0.5B"])
def test_memory_that_makes_no_sense_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_memory(given)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replicas", -1),
        ("replicas", True),
        ("kv_memory", "much"),
        ("dtype", "float16"),
        ("weights", "int8"),
        ("max_model_len", 1),
        ("session_header", "bad header"),
        ("threads", -1),
        ("placement_timeout_seconds", float("nan")),
        ("no_such_field", 1),
    ],
)
def test_a_bad_value_is_refused_with_the_name_of_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        AppArgs.model_validate({"model": "smollm2", field: value})
    assert any(line.startswith(f"{field}:") for line in describe_errors(caught.value))


def test_every_field_is_documented() -> None:
    assert [name for name, field in AppArgs.model_fields.items() if not field.description] == []


def test_keys_come_from_arguments_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("# team a\nkey-from-file\n\nkey-argument\n")
    monkeypatch.setenv("MOORAGE_API_KEYS", "key-environment, key-from-file,")
    args = AppArgs(model="m", api_keys=("key-argument",), api_key_file=tmp_path / "keys")
    loaded = [key.get_secret_value() for key in args.load_api_keys()]
    assert loaded == ["key-argument", "key-from-file", "key-environment"]


def test_a_value_is_said_once() -> None:
    for field, value in (("kv_memory", "lots"), ("allowed_origins", "a.example"), ("replicas", -1), ("device", "tpu")):
        with pytest.raises(ValidationError) as caught:
            AppArgs.model_validate({"model": "m", field: value})
        (line,) = describe_errors(caught.value)
        assert line.count(str(value)) == 1, line


def test_a_key_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    args = AppArgs(model="m", api_keys=("secret-key-1",))
    assert "secret-key-1" not in f"{args!r} {args} {args.model_dump_json()} {args.load_api_keys()}"
    with pytest.raises(ValidationError) as caught:
        AppArgs(model="m", api_keys=("short s",))
    assert "short s" not in " ".join(describe_errors(caught.value))
    monkeypatch.setenv("MOORAGE_API_KEYS", "abc")
    with pytest.raises(ValueError, match="8 to 512") as refused:
        args.load_api_keys()
    assert "abc" not in str(refused.value)


@pytest.mark.parametrize("content", ["", "# only a comment\n"])
def test_a_key_file_without_a_key_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").write_text(content)
    with pytest.raises(ValueError, match="holds no key"):
        AppArgs(model="m", api_key_file=tmp_path / "keys").load_api_keys()
    with pytest.raises(ValueError, match="cannot be read"):
        AppArgs(model="m", api_key_file=tmp_path / "missing").load_api_keys()


@pytest.mark.parametrize(("cores", "replicas", "ingresses"), [(2, 2, 1), (2, 1, 1), (1, 3, 2), (64, 8, 4)])
def test_replicas_and_ingress_fit_on_the_machine(cores: int, replicas: int, ingresses: int) -> None:
    args = AppArgs(model="m", replicas=replicas, ingress_replicas=ingresses)
    total = replicas * args.resolved_cpus(cores) + ingresses * args.cpus_per_ingress
    assert total <= cores
    assert args.resolved_threads(cores) * replicas <= max(cores, replicas)


def test_a_share_of_memory_is_divided_on_the_cpu_but_bytes_are_not() -> None:
    shared = AppArgs(model="m", replicas=3, kv_memory=0.3)
    assert shared.actor_options(cores=4, on_gpu=False).kv_memory == pytest.approx(0.1)
    assert shared.actor_options(cores=4, on_gpu=True).kv_memory == pytest.approx(0.3)
    fixed = AppArgs(model="m", replicas=3, kv_memory="1GiB")
    assert fixed.actor_options(cores=4, on_gpu=False).kv_memory == 2**30


@pytest.mark.parametrize(
    ("device", "cluster", "expected"), [("auto", 2, 1), ("auto", 1, 0), ("auto", 0, 0), ("cpu", 8, 0), ("cuda", 0, 1)]
)
def test_gpus_follow_the_device(device: str, cluster: float, expected: float) -> None:
    assert AppArgs.model_validate({"model": "m", "replicas": 2, "device": device}).resolved_gpus(cluster) == expected


def test_replicas_that_are_not_there_yet_want_no_gpu_that_the_cluster_does_not_have() -> None:
    args = AppArgs(model="m", replicas=0, max_replicas=2)
    assert (args.resolved_gpus(0.0), args.resolved_gpus(2.0)) == (0.0, 1.0)


def test_the_served_name_is_the_known_name_or_that_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "Tiny-Chat").mkdir()
    assert AppArgs(model="smollm2").model_name() == "smollm2"
    assert AppArgs(model="/models/Some-1B.Q4.gguf").model_name() == "Some-1B.Q4"
    assert AppArgs(model=str(tmp_path / "Tiny-Chat")).model_name() == "Tiny-Chat"
    assert AppArgs(model="smollm2", served_model_name="chat").model_name() == "chat"


def test_the_guide_of_the_configuration_is_what_the_fields_say() -> None:
    guide = (Path(__file__).parents[2] / "serve_app" / "docs" / "configuration.md").read_text("utf-8")
    assert guide.endswith(markdown()), "write it anew: moorage config --markdown"
    assert all(field.description for field in AppArgs.model_fields.values())
    assert sorted(name for names in groups().values() for name in names) == sorted(AppArgs.model_fields)


def test_every_limit_of_the_front_door_is_the_operators() -> None:
    limits = [name for name in IngressSettings.model_fields if name.startswith("max_")]
    settings = AppArgs(model="m").ingress_settings((), sampling=SamplingDefaults())
    assert {n: getattr(settings, n) for n in limits} == {n: IngressSettings.model_fields[n].default for n in limits}
    chosen = {name: 1024 - i for i, name in enumerate(limits)} | {"max_body_bytes": 2048}
    settings = AppArgs.model_validate({"model": "m", **chosen}).ingress_settings((), sampling=SamplingDefaults())
    assert {name: getattr(settings, name) for name in limits} == chosen
