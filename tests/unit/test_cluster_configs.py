"""The configuration files are what Ray and Moorage accept, and they do not open a door."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.schema import ServeDeploySchema

from serve_app import app
from serve_app.commands.serve import read_args
from serve_app.config import AppArgs

CONFIGS = Path(__file__).parents[2] / "cluster_configs"


def test_the_serve_config_passes_rays_schema_and_ours() -> None:
    text = yaml.safe_load((CONFIGS / "serve.yaml").read_text())
    schema = ServeDeploySchema.model_validate(text)
    assert schema.http_options.host == "127.0.0.1"
    [application] = schema.applications
    module, _, name = application.import_path.partition(":")
    assert module == app.__name__
    assert callable(getattr(app, name))
    args = AppArgs.model_validate(application.args)
    assert args.load_api_keys() == ()
    assert args.kv_memory > 1
    assert {deployment.name for deployment in application.deployments} == {app.ENGINES, app.FRONT_DOOR}


def test_the_local_config_is_what_moorage_serve_reads_and_flags_win() -> None:
    args = read_args(CONFIGS / "local.yaml", {"replicas": 1})
    assert args.replicas == 1
    assert args.max_sessions == 64


def test_serve_builds_the_application_from_the_plain_arguments_of_a_file() -> None:
    text = yaml.safe_load((CONFIGS / "serve.yaml").read_text())
    built = call_user_app_builder_with_args_if_necessary(app.build, text["applications"][0]["args"])
    assert isinstance(built, Application)
    with pytest.raises(ValidationError, match="replica_count"):
        call_user_app_builder_with_args_if_necessary(app.build, {"model": "smollm2", "replica_count": "2"})
