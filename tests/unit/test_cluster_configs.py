"""The configuration files are what Ray, Kubernetes and Moorage accept, and they do not open a door."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from pydantic import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve import Application
from ray.serve._private import haproxy_metrics, replica
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from serve_app.cluster import app
from serve_app.cluster.proxy.limits import CALLBACK, CALLBACK_VARIABLE
from serve_app.cluster.routing import sticky_router
from serve_app.commands.arguments import read_args
from serve_app.config import AppArgs
from serve_app.jobs import batch
from serve_app.telemetry.metrics import METRICS

CONFIGS = Path(__file__).parents[2] / "cluster_configs"
OUR_PORTS = {"serve": 8000, "metrics": 8080, "dashboard": 8265, "gcs-server": 6379, "client": 10001}


def load(name: str) -> Any:
    return yaml.safe_load((CONFIGS / name).read_text("utf-8"))


def documents(name: str) -> dict[str, Any]:
    """The documents of a Kubernetes file by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all((CONFIGS / name).read_text("utf-8"))}


# -- Serve -------------------------------------------------------------------------------------------------------------


def the_application(text: Any) -> ServeApplicationSchema:
    """Of a Serve config that passes Ray's schema, with arguments that pass ours."""
    schema = ServeDeploySchema.model_validate(text)
    [application] = schema.applications
    module, _, name = application.import_path.partition(":")
    assert module == app.__name__
    assert callable(getattr(app, name))
    AppArgs.model_validate(application.args)
    assert {deployment.name for deployment in application.deployments} <= {app.ENGINES, app.FRONT_DOOR}
    # Engines scale by what limits them, which is under `args`.
    assert all("autoscaling_config" not in deployment.model_fields_set for deployment in application.deployments)
    return application


def test_the_serve_config_passes_rays_schema_and_ours_and_stays_on_loopback() -> None:
    text = load("serve.yaml")
    args = AppArgs.model_validate(the_application(text).args)
    assert text["http_options"]["host"] == "127.0.0.1"
    assert args.load_api_keys() == ()
    assert args.kv_memory > 1


def test_the_local_config_is_what_moorage_serve_reads_and_flags_win() -> None:
    args = read_args(CONFIGS / "local.yaml", {"replicas": 1})
    assert args.replicas == 1
    assert args.max_sessions == 64


def test_serve_builds_the_application_from_the_plain_arguments_of_a_file() -> None:
    built = call_user_app_builder_with_args_if_necessary(app.build, load("serve.yaml")["applications"][0]["args"])
    assert isinstance(built, Application)
    with pytest.raises(ValidationError, match="replica_count"):
        call_user_app_builder_with_args_if_necessary(app.build, {"model": "smollm2", "replica_count": "2"})


# -- machines in a cloud -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml"])
def test_a_cluster_file_passes_rays_schema_and_its_doors_are_closed(name: str) -> None:
    config = load(name)
    validate_config(prepare_config(config))
    workers = config["available_node_types"]["gpu"]
    assert config["available_node_types"][config["head_node_type"]]["resources"]["GPU"] == 0
    assert workers["resources"]["GPU"] > 0
    assert 0 <= workers["min_workers"] < workers["max_workers"] <= config["max_workers"]
    assert "--env RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    assert f"--env {CALLBACK_VARIABLE}={CALLBACK}" in config["docker"]["run_options"]
    assert "~/.ray/auth_token" in config["file_mounts"]
    assert config["provider"]["use_internal_ips"] is True
    [_, head] = config["head_start_ray_commands"]
    [_, worker] = config["worker_start_ray_commands"]
    assert "--dashboard-host=127.0.0.1" in head
    for port in (
        "node-manager-port",
        "object-manager-port",
        "runtime-env-agent-port",
        "dashboard-agent-listen-port",
        "metrics-export-port",
        "min-worker-port",
        "max-worker-port",
    ):  # a firewall needs them all by number, and the same on all nodes
        number = re.search(rf"--{port}=(\d+)", head)
        assert number is not None, port
        assert f"--{port}={number[1]}" in worker


# -- Kubernetes --------------------------------------------------------------------------------------------------------


def pods(cluster: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pod and only container of each group, the head first."""
    templates = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    return [(template["spec"], *template["spec"]["containers"]) for template in templates]


def check_cluster(cluster: dict[str, Any]) -> None:
    """What matters in any of our Ray clusters on Kubernetes."""
    known = {"rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec"}
    assert set(cluster) <= known | {"workerGroupSpecs"}
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for pod, container in pods(cluster):
        assert container["resources"]["requests"] == container["resources"]["limits"]  # else Ray believes too much
        for probe in ("readinessProbe", "livenessProbe"):
            assert set(container[probe]["httpGet"]) == {"path", "port"}
        for port in container["ports"]:
            assert OUR_PORTS[port["name"]] == port["containerPort"]
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in pod.get("volumes", ())}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())  # KubeRay takes nothing else


def test_the_rayservice_serves_our_application_on_a_cluster_that_can_hold_it() -> None:
    service = documents("kuberay-rayservice.yaml")["RayService"]
    assert service["apiVersion"] == "ray.io/v1"
    assert set(service["spec"]) == {
        "excludeHeadPodFromServeSvc", "rayClusterDeletionDelaySeconds", "serveConfigV2", "rayClusterConfig",
    }  # fmt: skip
    text = yaml.safe_load(service["spec"]["serveConfigV2"])
    application = the_application(text)
    args = AppArgs.model_validate(application.args)
    cluster = service["spec"]["rayClusterConfig"]
    check_cluster(cluster)
    assert cluster["enableInTreeAutoscaling"] is True
    [(_, head), (worker, container)] = pods(cluster)
    for speaks_http in (head, container):
        assert {"name": CALLBACK_VARIABLE, "value": CALLBACK} in speaks_http["env"]

    limits = container["resources"]["limits"]
    assert args.gpus_per_replica == float(limits["nvidia.com/gpu"])
    assert args.cpus_per_replica is not None
    assert args.cpus_per_replica + args.cpus_per_ingress <= float(limits["cpu"])
    group = cluster["workerGroupSpecs"][0]
    least, most = args.replica_bounds()
    assert args.autoscales
    assert (least, most) == (group["minReplicas"], group["maxReplicas"])
    assert app.ENGINES not in {deployment.name for deployment in application.deployments}  # it would fix their number

    drain = args.graceful_shutdown_timeout_seconds
    hook = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    timeout = re.search(r"moorage drain-node --timeout (\d+)$", hook)
    assert timeout is not None
    assert drain <= int(timeout[1]) < worker["terminationGracePeriodSeconds"]
    assert service["spec"]["rayClusterDeletionDelaySeconds"] >= drain

    # All interfaces, so keys, from a file that is mounted where the engines and front doors are.
    assert text["http_options"]["host"] == "0.0.0.0"
    [keys] = [mount for mount in container["volumeMounts"] if mount["name"] == "keys"]
    assert args.api_key_file is not None
    assert str(args.api_key_file).startswith(keys["mountPath"] + "/")
    assert container["readinessProbe"]["httpGet"]["port"] == text["http_options"]["port"]


def test_the_network_policy_and_the_pod_monitor_choose_the_pods_of_the_service() -> None:
    files = documents("kuberay-rayservice.yaml")
    cluster = files["RayService"]["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    policy = files["NetworkPolicy"]["spec"]
    monitor = documents("podmonitor.yaml")["PodMonitor"]["spec"]
    for chosen in (policy["podSelector"], monitor["selector"]):
        assert all(chosen["matchLabels"].items() <= group["template"]["metadata"]["labels"].items() for group in groups)
    open_to_all = [port["port"] for rule in policy["ingress"] if "from" not in rule for port in rule["ports"]]
    assert open_to_all == [8000]
    [endpoint] = monitor["podMetricsEndpoints"]
    assert all(endpoint["port"] in {port["name"] for port in container["ports"]} for _, container in pods(cluster))


def test_the_rayjob_runs_the_batch_command_on_files_that_its_driver_has() -> None:
    files = documents("kuberay-rayjob.yaml")
    job = files["RayJob"]["spec"]
    assert files["RayJob"]["apiVersion"] == "ray.io/v1"
    assert set(job) == {
        "entrypoint", "submissionMode", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit",
        "activeDeadlineSeconds", "rayClusterSpec",
    }  # fmt: skip
    check_cluster(job["rayClusterSpec"])
    words = job["entrypoint"].split()
    assert words[:3] == ["python", "-m", "serve_app.jobs.batch"]
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert set(flags) <= {flag for parameter in typer.main.get_command(batch.app).params for flag in parameter.opts}
    head, container = pods(job["rayClusterSpec"])[0]
    folders = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert flags["--input"].startswith(folders["data"] + "/")
    assert flags["--output"].startswith(folders["data"] + "/")
    sources = {volume["name"]: volume for volume in head["volumes"]}
    claim = sources["data"]["persistentVolumeClaim"]["claimName"]
    assert files["PersistentVolumeClaim"]["metadata"]["name"] == claim
    assert files["ConfigMap"]["metadata"]["name"] == sources["config"]["configMap"]["name"]
    [(name, content)] = files["ConfigMap"]["data"].items()
    assert flags.pop("--config") == f"{folders['config']}/{name}"
    args = AppArgs.model_validate({"model": flags["--model"], **yaml.safe_load(content)})
    [workers] = job["rayClusterSpec"]["workerGroupSpecs"]
    [(_, worker)] = pods(job["rayClusterSpec"])[1:]
    assert args.gpus_per_replica == float(worker["resources"]["limits"]["nvidia.com/gpu"])
    assert args.replicas == workers["replicas"]
    assert set(flags) == {"--input", "--output", "--model"}


# -- what is watched ---------------------------------------------------------------------------------------------------


def test_prometheus_finds_the_nodes_by_the_file_that_ray_writes() -> None:
    [job] = load("prometheus.yaml")["scrape_configs"]
    assert job["file_sd_configs"][0]["files"] == ["/tmp/ray/prom_metrics_service_discovery.json"]


def board() -> dict[str, Any]:
    loaded = json.loads((CONFIGS / "grafana" / "moorage.json").read_text("utf-8"))
    assert isinstance(loaded, dict)
    return loaded


OTHERS = {
    "ray_moorage_routing_decisions_total": sticky_router,
    "ray_serve_num_http_requests_total": haproxy_metrics,
    "ray_serve_deployment_replica_starts_total": replica,
}
"""Metrics that are not an engine's, and the modules that make them."""


def test_every_metric_of_the_dashboard_exists_and_every_one_of_an_engine_is_shown() -> None:
    expressions = [target["expr"] for panel in board()["panels"] for target in panel.get("targets", ())]
    used = {name for expr in expressions for name in re.findall(r"\bray_\w+", expr)}
    assert used <= {name for metric in METRICS for name in metric.exported} | set(OTHERS)
    assert [metric.name for metric in METRICS if not used & set(metric.exported)] == []
    for name, module in OTHERS.items():
        assert name.removeprefix("ray_").removesuffix("_total") in Path(module.__file__).read_text("utf-8")


def test_the_dashboard_is_whole() -> None:
    text = board()
    panels = text["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    assert [variable["name"] for variable in text["templating"]["list"]] == ["datasource", "model", "replica"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            expr = target["expr"]
            assert expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}")
            assert panel["description"]
