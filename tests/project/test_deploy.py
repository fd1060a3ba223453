"""The manifests: valid for current Kubernetes versions, consistent with the code, and with few permissions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
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
from clustergym.kubernetes.certificates import CONFIGURATION, TLS_SECRET, TOKEN_SECRET
from clustergym.kubernetes.names import MODE, PROTECTED_NAMESPACES
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
    quickstart = yaml.safe_load((DEPLOY / "quickstart" / "kustomization.yaml").read_text())
    assert base["images"][0]["newTag"] == quickstart["images"][0]["newTag"] == __version__


def rendered(*components: str, folder: Path) -> dict[str, dict[str, Any]]:
    """What kustomize makes of the base and these components."""
    shutil.copytree(DEPLOY, folder / "deploy")
    path = folder / "deploy" / "kustomization.yaml"
    content = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(content | {"components": [f"components/{name}" for name in components]}))
    return kustomize(folder / "deploy")


def kustomize(folder: Path) -> dict[str, dict[str, Any]]:
    program = shutil.which("kubectl") or f"{os.environ.get('KUBEBUILDER_ASSETS', '')}/kubectl"
    if not Path(program).is_file():
        pytest.skip("no kubectl in PATH or KUBEBUILDER_ASSETS")
    found = subprocess.run([program, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in yaml.safe_load_all(found.stdout)}


CONTAINERS = {
    "Deployment/clustergym-webhook": webhook_command.Command,
    "DaemonSet/clustergym-collector": collector_command.Command,
    "DaemonSet/clustergym-agent": load_trainer("ppo_gpu_alloc_online").Args,
    "StatefulSet/clustergym-recommender": load_trainer("ppo_gpu_alloc_online").Args,
}
COMPONENTS = sorted(path.name for path in (DEPLOY / "components").iterdir())


def flags_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The settings that the programs get, by object. Every object fits its schema."""
    for one in objects.values():
        if one["apiVersion"] not in ("monitoring.coreos.com/v1", "cert-manager.io/v1"):
            kubernetes_validate.validate(one, "1.33", strict=True)
    return {
        name: tyro.cli(command, args=objects[name]["spec"]["template"]["spec"]["containers"][0]["args"])
        for name, command in CONTAINERS.items()
    }


@pytest.mark.parametrize("components", [(), *((one,) for one in COMPONENTS), COMPONENTS, COMPONENTS[::-1]], ids=str)
def test_components_can_be_combined(tmp_path: Path, components: tuple[str, ...]) -> None:
    flags = flags_of(rendered(*components, folder=tmp_path))
    webhook, collector, agent, recommender = (flags[name] for name in CONTAINERS)
    backend = [one for one in components if one in ("hami", "kai")]
    assert webhook.backend == (backend[-1] if backend else "mps")
    assert webhook.secrets_namespace == "clustergym"
    assert (webhook.cert is not None) == ("cert-manager" in components)
    assert (webhook.client_ca is not None) == ("client-certificates" in components)
    assert (collector.metrics_url is not None) + collector.nvml + collector.simulate >= 1
    assert collector.nvml == ("nvml" in components)
    assert agent.server.shadow == recommender.server.shadow == ("grant" not in components)
    assert (agent.server.telemetry, recommender.server.telemetry) == (True, False)


@pytest.mark.parametrize("name", ["", "quickstart"])
def test_the_overlays_can_be_applied(name: str) -> None:
    objects = kustomize(DEPLOY / name)
    flags = flags_of(objects)
    if name == "quickstart":
        collector = flags["DaemonSet/clustergym-collector"]
        assert (collector.simulate, collector.metrics_url, collector.qos_queries) == (True, None, None)
        assert "nodeSelector" not in objects["DaemonSet/clustergym-collector"]["spec"]["template"]["spec"]
        assert not flags["StatefulSet/clustergym-recommender"].server.shadow


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


def test_the_webhook_can_read_nodes_and_write_only_what_it_makes() -> None:
    assert BASE["ClusterRole/clustergym-webhook"]["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
        {
            "apiGroups": ["admissionregistration.k8s.io"], "resources": ["mutatingwebhookconfigurations"],
            "resourceNames": [CONFIGURATION], "verbs": ["get", "patch"],
        },
    ]  # fmt: skip
    assert BASE["Role/clustergym-webhook"]["rules"] == [
        {
            "apiGroups": [""], "resources": ["secrets"], "resourceNames": [TLS_SECRET, TOKEN_SECRET],
            "verbs": ["get", "update"],
        }
    ]  # fmt: skip
    for name in (TLS_SECRET, TOKEN_SECRET):
        assert "data" not in BASE[f"Secret/{name}"]  # so that applying it again changes nothing


def test_the_collector_can_only_list_pods_and_namespaces() -> None:
    assert BASE["ClusterRole/clustergym-collector"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods", "namespaces"], "verbs": ["list"]}
    ]


def test_every_role_sees_only_its_own_token() -> None:
    def keys(name: str) -> list[str]:
        (secret,) = [one["secret"] for one in pod_of(name)["volumes"] if one["name"] == "token"]
        assert secret["secretName"] == "clustergym-agent-token"
        # With items, a pod waits until its tokens are made.
        return [item["key"] for item in secret["items"]]

    assert keys("DaemonSet/clustergym-collector") == ["collector"]
    for name in ("DaemonSet/clustergym-agent", "StatefulSet/clustergym-recommender"):
        assert keys(name) == ["operator", "webhook", "collector"]
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
    rules = yaml.safe_load((DEPLOY / "components" / "monitoring" / "alerts.yaml").read_text())
    (group,) = rules["spec"]["groups"]
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


def test_monitoring_scrapes_the_ports_of_the_containers() -> None:
    monitor = yaml.safe_load((DEPLOY / "components" / "monitoring" / "pod-monitor.yaml").read_text())["spec"]
    ports = {one["port"] for one in monitor["podMetricsEndpoints"]}
    for name in CONTAINERS:
        assert ports & {one["name"] for one in pod_of(name)["containers"][0]["ports"]}
        labels = BASE[name]["spec"]["template"]["metadata"]["labels"]
        assert monitor["selector"]["matchLabels"].items() <= labels.items()


def test_probes_of_the_webhook_use_the_plain_port() -> None:
    (one,) = pod_of("Deployment/clustergym-webhook")["containers"]
    args = tyro.cli(webhook_command.Command, args=one["args"])
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


@pytest.mark.parametrize("name", CONTAINERS)
def test_unknown_flags_are_refused(name: str) -> None:
    """So the tests above find a flag in a manifest that the program does not have."""
    with pytest.raises(SystemExit):
        tyro.cli(CONTAINERS[name], args=[*pod_of(name)["containers"][0]["args"], "--no-such-flag=1"])


def test_the_image_contains_what_the_manifests_run() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    for name in ("DaemonSet/clustergym-agent", "StatefulSet/clustergym-recommender"):
        # The wheel contains the program: tests/project/test_packaging.py installs it.
        assert pod_of(name)["containers"][0]["command"] == ["clustergym", "agent", "serve"]
    assert re.search(r"USER 65532", dockerfile)
    for source in re.findall(r"^COPY (?!--)(.+) \S+$", dockerfile, flags=re.M):
        for part in source.split():
            assert (DEPLOY.parent / part).exists(), part
