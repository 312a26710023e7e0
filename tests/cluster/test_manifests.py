"""The manifests that operators apply: valid for Ray, for Serve and for us, and in agreement with each other."""

from pathlib import Path

import pytest
import yaml

from tailrace.cluster.config import SECTIONS, TailraceConfig, load_config, load_file, read_args
from tailrace.cluster.schema import json_schema

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
SERVE = sorted(path.name for path in (MANIFESTS / "serve").glob("*.yaml"))
RAY = sorted(path.name for path in (MANIFESTS / "ray").glob("*.yaml"))


def document(kind: str, name: str) -> dict:
    return yaml.safe_load((MANIFESTS / kind / name).read_text())


def test_the_expected_manifests_are_there():
    assert SERVE == ["cluster.yaml", "full.yaml", "local.yaml"]
    assert RAY == ["cluster.yaml", "local.yaml"]


@pytest.mark.parametrize("name", SERVE)
def test_a_serve_manifest_is_a_configuration_of_ours(name):
    import jsonschema

    load_file(MANIFESTS / "serve" / name)
    jsonschema.validate(read_args(MANIFESTS / "serve" / name), json_schema())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SERVE)
def test_a_serve_manifest_suits_serves_own_schema_which_takes_unknown_keys(name):
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    data = document("serve", name)
    schema = ServeDeploySchema.model_validate(data)
    assert schema.applications[0].import_path == "tailrace.cluster.app:build"
    assert set(data) <= set(ServeDeploySchema.model_fields)
    assert set(data["applications"][0]) <= set(ServeApplicationSchema.model_fields)


def test_the_full_manifest_holds_the_defaults():
    ours = load_config(read_args(MANIFESTS / "serve/full.yaml"))
    default = TailraceConfig()
    different = {name for name in TailraceConfig.model_fields if getattr(ours, name) != getattr(default, name)}
    assert different == {"transceiver_runtime"}


def test_the_full_manifest_calls_prototypes_what_the_schema_does():
    said, wanted, above = set(), set(), []
    for line in (MANIFESTS / "serve/full.yaml").read_text().splitlines():
        key, _, comment = line.partition("#")
        name = key.split(":")[0].strip()
        depth = len(key) - len(key.lstrip())
        if not name or depth < 6:
            continue
        above = above[: (depth - 6) // 2]
        kind = SECTIONS[above[0]] if above else TailraceConfig
        extra = kind.model_fields[name].json_schema_extra
        above.append(name)
        if name in SECTIONS:
            continue
        dotted = ".".join(above)
        said |= {dotted} if "prototype" in comment else set()
        wanted |= {dotted} if extra["x-status"] == "prototype" else set()
    assert said and said == wanted


@pytest.mark.parametrize("name", RAY)
def test_a_ray_manifest_passes_rays_own_validation(name):
    from ray.autoscaler._private.util import prepare_config, validate_config

    data = document("ray", name)
    validate_config(prepare_config(data))
    with pytest.raises(Exception, match="worker_ip|min_worker|unexpected|Additional"):
        validate_config(prepare_config({**document("ray", name), "min_worker": 1}))


def test_the_cloud_cluster_has_a_node_type_a_pool_with_the_label_that_serve_asks_for():
    types = document("ray", "cluster.yaml")["available_node_types"]
    config = load_config(read_args(MANIFESTS / "serve/cluster.yaml"))
    assert types["ctx"]["labels"] == config.ctx.labels
    assert types["gen"]["labels"] == config.gen.labels
    assert types["head"]["labels"] == config.router.labels == config.ingress.labels


@pytest.mark.parametrize("name", RAY)
def test_every_host_of_a_cluster_uses_the_haproxy_ingress_and_lets_streams_live(name):
    data = document("ray", name)
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        start = data[key][-1]
        assert "RAY_SERVE_ENABLE_HA_PROXY=1" in start
        assert "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S=86400" in start
    assert "~/.ray/auth_token" in data["file_mounts"]
