"""The Dockerfile: no engine builds it here, so a linter reads it, and what matters in it is looked up."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cluster_configs"
DOCKERFILE = FOLDER / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Without comments, continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in whole)]


def arguments_of(wanted: str) -> list[str]:
    return [rest for word, rest in instructions() if word == wanted]


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("hadolint", path=str(Path(sys.executable).parent)) is None,
    reason="hadolint's wheels are for Linux on x86_64",
)
def test_the_linter_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    checked = subprocess.run([str(hadolint), str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (checked.stdout, checked.returncode) == ("", 0)


def test_one_file_makes_both_images_by_an_argument() -> None:
    assert [argument.partition("=")[0] for argument in arguments_of("ARG")] == ["TORCH", "TORCH_INDEX"]
    assert len(arguments_of("FROM")) == 1
    [installs] = [run for run in arguments_of("RUN") if "serve_app.commands.install" in run]
    assert '--torch "$TORCH" --torch-index "$TORCH_INDEX"' in installs


def test_it_runs_as_no_root_with_its_models_on_a_volume_that_the_user_owns() -> None:
    words = [word for word, _ in instructions()]
    [user], [volume] = arguments_of("USER"), arguments_of("VOLUME")
    [home] = [rest.partition("=")[2] for rest in arguments_of("ENV") if rest.startswith("MOORAGE_HOME=")]
    assert user == "1000" and volume == home
    [makes_user] = [run for run in arguments_of("RUN") if "useradd" in run]
    assert f"--uid {user}" in makes_user and '--owner moorage --group moorage "$MOORAGE_HOME"' in makes_user
    assert words.index("VOLUME") > [rest for _, rest in instructions()].index(makes_user)
    assert "RUN" not in words[words.index("USER") :]


def test_what_is_copied_is_all_that_the_installation_reads() -> None:
    allowed = (FOLDER / "Dockerfile.dockerignore").read_text("utf-8").split("\n")
    kept = {line[1:] for line in allowed if line.startswith("!")}
    assert "*" in allowed
    assert all((ROOT / name).exists() for name in kept)
    assert {"serve_app", "engine_actor", "kernels", "pyproject.toml", "README.md"} <= kept
    assert "cluster_configs/constraints.txt" in kept


def test_it_has_the_python_that_the_pins_were_made_with() -> None:
    made_with = re.search(r"on Python (\d+\.\d+)", (FOLDER / "constraints.txt").read_text("utf-8"))
    assert made_with is not None
    assert arguments_of("FROM")[0].startswith(f"python:{made_with[1]}-slim")


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml", "kuberay-rayservice.yaml", "kuberay-rayjob.yaml"])
def test_clusters_with_gpus_run_the_image_for_them(name: str) -> None:
    """By the name that the Dockerfile's own commands give it."""
    text = (FOLDER / name).read_text("utf-8")
    list(yaml.safe_load_all(text))
    images = set(re.findall(r"image: (\S+)", text))
    [command] = [line for line in DOCKERFILE.read_text("utf-8").splitlines() if "--build-arg TORCH=cuda" in line]
    assert images == {re.search(r"-t (\S+)", command)[1]}  # type: ignore[index]
    assert "cluster_configs/Dockerfile" in text


def test_the_batch_job_may_write_to_its_volume() -> None:
    job = next(yaml.safe_load_all((FOLDER / "kuberay-rayjob.yaml").read_text("utf-8")))
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert head["securityContext"]["fsGroup"] == int(arguments_of("USER")[0])
