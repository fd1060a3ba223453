"""The manifests: valid for current Kubernetes versions, consistent with the code, and with few permissions."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import tyro
import yaml

from clustergym import __version__
from clustergym.cli import collector as collector_command
from clustergym.cli import webhook as webhook_command
from clustergym.kubernetes import LABEL, MODES
from clustergym.kubernetes.names import MODE, PROTECTED_NAMESPACES
from clustergym.kubernetes.patches import apply_patch
from trainers import load_trainer

DEPLOY = Path(__file__).parents[2] / "deploy"
BASE = {
    f"{one['kind']}/{one['metadata']['name']}": one
    for path in sorted((DEPLOY / "base").glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for one in yaml.safe_load_all(path.read_text())
}


@pytest.mark.parametrize("version", ["1.29", "1.33", "1.37"])
@pytest.mark.parametrize("name", BASE)
def test_manifests_match_the_schemas(name: str, version: str) -> None:
    kubernetes_validate.validate(BASE[name], version, strict=True)


def test_the_schema_check_finds_a_misspelt_field() -> None:
    wrong = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"port": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.33", strict=True)


def test_kustomize_lists_every_file() -> None:
    base = yaml.safe_load((DEPLOY / "base" / "kustomization.yaml").read_text())
    files = {path.name for path in (DEPLOY / "base").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(base["resources"]) == files
    assert base["images"][0]["newTag"] == __version__
    for overlay in (DEPLOY, DEPLOY / "cert-manager", DEPLOY / "nvml"):
        for resource in yaml.safe_load((overlay / "kustomization.yaml").read_text())["resources"]:
            assert (overlay / resource).exists(), resource


def pod_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = BASE[name]["spec"]["template"]["spec"]
    return found


@pytest.mark.parametrize(
    "name",
    [
        "DaemonSet/clustergym-agent",
        "DaemonSet/clustergym-collector",
        "StatefulSet/clustergym-recommender",
        "Deployment/clustergym-webhook",
    ],
)
def test_containers_have_few_permissions(name: str) -> None:
    spec = pod_of(name)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for one in spec["containers"]:
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert {"requests", "limits"} <= set(one["resources"])
    for one in spec.get("initContainers", []):
        # Needs root to change the owner of the folder that the kubelet created.
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
        assert one["securityContext"]["allowPrivilegeEscalation"] is False


def test_the_agent_uses_the_host_network_and_no_api_server_token() -> None:
    spec = pod_of("DaemonSet/clustergym-agent")
    assert spec["hostNetwork"] is True
    assert spec["automountServiceAccountToken"] is False
    assert BASE["ServiceAccount/clustergym-agent"]["automountServiceAccountToken"] is False
    assert any(argument.startswith("--token-file=") for argument in spec["containers"][0]["args"])


def test_the_webhook_can_only_get_nodes() -> None:
    assert BASE["ClusterRole/clustergym-webhook"]["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}
    ]


def test_the_nvml_overlay_changes_only_where_the_usage_comes_from() -> None:
    base = BASE["DaemonSet/clustergym-collector"]
    patched = apply_patch(base, yaml.safe_load((DEPLOY / "nvml" / "collector.yaml").read_text()))
    kubernetes_validate.validate(patched, "1.33", strict=True)
    pods = [one["spec"]["template"]["spec"] for one in (base, patched)]
    plain, nvml = (tyro.cli(collector_command.Command, args=one["containers"][0]["args"]) for one in pods)
    assert (plain.nvml, nvml.nvml, nvml.metrics_url) == (False, True, None)
    assert dataclasses.replace(nvml, nvml=False, metrics_url=plain.metrics_url) == plain
    assert [one.get("hostPID", False) for one in pods] == [False, True]
    assert pods[1]["containers"][0]["securityContext"] == pods[0]["containers"][0]["securityContext"]


def test_the_collector_can_only_list_pods_and_namespaces() -> None:
    assert BASE["ClusterRole/clustergym-collector"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods", "namespaces"], "verbs": ["list"]}
    ]


def test_every_role_sees_only_its_own_token() -> None:
    def keys(name: str) -> list[str] | None:
        (secret,) = [one["secret"] for one in pod_of(name)["volumes"] if one["name"] == "token"]
        assert secret["secretName"] == "clustergym-agent-token"
        return [item["key"] for item in secret["items"]] if "items" in secret else None

    assert keys("Deployment/clustergym-webhook") == ["webhook"]
    assert keys("DaemonSet/clustergym-collector") == ["collector"]
    for name in ("DaemonSet/clustergym-agent", "StatefulSet/clustergym-recommender"):
        assert keys(name) is None
        args = tyro.cli(load_trainer("ppo_gpu_alloc_online").Args, args=pod_of(name)["containers"][0]["args"]).server
        files = (args.token_file, args.webhook_token_file, args.collector_token_file)
        assert [path.name for path in files] == ["operator", "webhook", "collector"]
        assert args.min_run_s > 0


def test_only_webhook_collectors_and_monitoring_reach_the_recommender() -> None:
    spec = BASE["NetworkPolicy/clustergym-recommender"]["spec"]
    labels = BASE["StatefulSet/clustergym-recommender"]["spec"]["template"]["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    (rule,) = spec["ingress"]
    pods, namespaces = rule["from"]
    (components,) = pods["podSelector"]["matchExpressions"]
    assert components["values"] == ["webhook", "collector"]
    assert set(namespaces) == {"namespaceSelector"}


def test_the_alert_counts_reports_at_the_end_of_pods() -> None:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    (alert,) = [one for one in group["rules"] if one["alert"] == "ClustergymNoFeedback"]
    assert 'clustergym_feedback_total{status="accepted"}' in alert["expr"]


def test_one_of_two_webhooks_stays_available() -> None:
    assert BASE["Deployment/clustergym-webhook"]["spec"]["replicas"] == 2
    assert BASE["PodDisruptionBudget/clustergym-webhook"]["spec"]["minAvailable"] == 1


def test_selectors_match_the_labels() -> None:
    labels = BASE["Deployment/clustergym-webhook"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        BASE["Deployment/clustergym-webhook"]["spec"]["selector"]["matchLabels"],
        BASE["Service/clustergym-webhook"]["spec"]["selector"],
        BASE["PodDisruptionBudget/clustergym-webhook"]["spec"]["selector"]["matchLabels"],
        BASE["NetworkPolicy/clustergym-webhook"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()


def test_webhooks_fail_open_and_see_only_namespaces_that_opted_in() -> None:
    webhooks = BASE["MutatingWebhookConfiguration/clustergym"]["webhooks"]
    (deadline,) = [
        float(argument.partition("=")[2])
        for argument in pod_of("Deployment/clustergym-webhook")["containers"][0]["args"]
        if argument.startswith("--deadline-s=")
    ]
    for one, mode in zip(webhooks, MODES, strict=True):
        assert one["failurePolicy"] == "Ignore"
        assert one["timeoutSeconds"] > deadline
        assert one["sideEffects"] == "NoneOnDryRun"
        assert one["namespaceSelector"]["matchLabels"] == {MODE: mode}
        (expression,) = one["namespaceSelector"]["matchExpressions"]
        assert expression["operator"] == "NotIn"
        assert set(expression["values"]) >= PROTECTED_NAMESPACES
        assert one["clientConfig"]["service"]["name"] == BASE["Service/clustergym-webhook"]["metadata"]["name"]
        assert one["objectSelector"] == {"matchLabels": {LABEL: "true"}}
        assert one["clientConfig"]["service"]["path"] == f"/mutate/pods/{mode.lower()}"


def test_the_webhook_requires_client_certificates_and_probes_use_the_plain_port() -> None:
    (one,) = pod_of("Deployment/clustergym-webhook")["containers"]
    args = tyro.cli(webhook_command.Command, args=one["args"])
    mounts = {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
    assert str(args.client_ca) == f"{mounts['client-ca']}/ca.crt"
    ports = {port["name"]: port["containerPort"] for port in one["ports"]}
    assert ports == {"https": args.port, "health": args.health_port, "metrics": args.metrics_port}
    for probe in (one["livenessProbe"], one["readinessProbe"]):
        assert probe["httpGet"]["port"] == "health"


@pytest.mark.parametrize("name", ["DaemonSet/clustergym-agent", "StatefulSet/clustergym-recommender"])
def test_agents_start_in_shadow_mode_with_the_shipped_policy(name: str) -> None:
    assert {"--shadow", "--init-checkpoint=pretrained"} <= set(pod_of(name)["containers"][0]["args"])


def test_the_webhook_asks_the_recommender() -> None:
    args = tyro.cli(webhook_command.Command, args=pod_of("Deployment/clustergym-webhook")["containers"][0]["args"])
    service = BASE["Service/clustergym-recommender"]
    assert args.recommender_url == f"http://clustergym-recommender.clustergym.svc:{service['spec']['ports'][0]['port']}"
    labels = BASE["StatefulSet/clustergym-recommender"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("Deployment/clustergym-webhook", webhook_command.Command),
        ("DaemonSet/clustergym-collector", collector_command.Command),
        ("DaemonSet/clustergym-agent", load_trainer("ppo_gpu_alloc_online").Args),
        ("StatefulSet/clustergym-recommender", load_trainer("ppo_gpu_alloc_online").Args),
    ],
)
def test_the_flags_of_the_manifests_are_accepted(name: str, command: Any) -> None:
    tyro.cli(command, args=pod_of(name)["containers"][0]["args"])
    with pytest.raises(SystemExit):
        tyro.cli(command, args=["--no-such-flag=1"])


def test_the_image_contains_what_the_manifests_run() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    for name in ("DaemonSet/clustergym-agent", "StatefulSet/clustergym-recommender"):
        # The wheel contains the program: tests/project/test_packaging.py installs it.
        assert pod_of(name)["containers"][0]["command"] == ["clustergym", "agent", "serve"]
    assert re.search(r"USER 65532", dockerfile)
    for source in re.findall(r"^COPY (?!--)(.+) \S+$", dockerfile, flags=re.M):
        for part in source.split():
            assert (DEPLOY.parent / part).exists(), part
