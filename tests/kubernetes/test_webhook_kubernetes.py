"""The webhook with a real kube-apiserver: what it stores and refuses, and that failures never block a pod."""

from __future__ import annotations

import base64
import re
import signal
import subprocess
import time
from typing import Any

import pytest
import yaml

from agent_client import Server as Agent
from clustergym.kubernetes.messages import is_allocation_id
from clustergym.kubernetes.requests import quantity
from processes import wait_until
from webhook_cluster import (
    CORES,
    MEMORY,
    NAMES,
    ROOT,
    TABLE,
    Setup,
    configuration,
    environment,
    made,
    on_node,
    webhook_server,
)
from webhook_cluster import real_agent as real_agent  # a fixture
from webhook_cluster import setup as setup  # a fixture
from webhook_pods import container, pod


def test_a_pod_that_names_its_node_gets_what_the_agent_of_the_node_grants(setup: Setup) -> None:
    created = made(setup, on_node(pod(), "node-good"))
    assert environment(created) == {CORES: "60", MEMORY: "0=2000M"}
    annotations = created["metadata"]["annotations"]
    assert is_allocation_id(annotations["clustergym.io/allocation-id"])
    assert annotations["clustergym.io/agent"] == "node"
    assert annotations["clustergym.io/granted-cores"] == "60"
    assert annotations["clustergym.io/granted-memory"] == "2000"
    assert annotations["clustergym.io/policy-version"] == "7"
    assert annotations["clustergym.io/decided-by"] == "rule: VPA rule"
    assert annotations["clustergym.io/status"] == "granted"
    asked = setup.agents["good"].seen[-1]
    assert len(asked.pop("request_id")) == 36  # uid of the review
    assert asked == {
        "owner": f"mps/Pod/{created['metadata']['name']}", "cores": 80, "memory": 4000,
        "qos_class": "latency-sensitive", "shadow": False, "gpu": None,
        "min_cores": 0, "max_cores": 80, "min_memory": 0, "max_memory": 4000,
    }  # fmt: skip
    # Without a recommender, a pod that does not name its node gets its request.
    assert environment(made(setup, pod())) == {CORES: "80", MEMORY: "0=4000M"}


def test_the_real_agent_grants_a_share_and_accepts_feedback(setup: Setup, real_agent: Agent) -> None:
    """From the creation of a pod to the feedback on its allocation, with real servers only."""
    found = made(setup, on_node(pod(), "node-real"))
    annotations = found["metadata"]["annotations"]
    assert annotations["clustergym.io/status"] == "granted"
    assert annotations["clustergym.io/decided-by"] == "request: the owner has few pods yet"
    cores = float(annotations["clustergym.io/granted-cores"])
    assert environment(found) == {CORES: "80", MEMORY: "0=4000M"}
    allocation_id = annotations["clustergym.io/allocation-id"]
    body = {"allocation_id": allocation_id, "actual_usage": 0.5 * cores, "qos_met": True}
    assert real_agent.post("/feedback", body) == (200, {"status": "accepted", "reward": 1.25})
    assert real_agent.post("/feedback", body) == (200, {"status": "duplicate", "reward": None})


# Grants before scheduling


def hami_pod(cores: int = 80, memory: int = 4000, **annotations: str) -> dict[str, Any]:
    one = container()
    one["resources"]["limits"] |= {"nvidia.com/gpucores": str(cores), "nvidia.com/gpumem": str(memory)}
    return pod(one, annotations={f"clustergym.io/{key.replace('_', '-')}": value for key, value in annotations.items()})


def counted(found: dict[str, Any]) -> tuple[float, float]:
    """What HAMi's scheduler counts. The API server requires equal requests and limits of extended resources."""
    resources = found["spec"]["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"]
    # The API server writes 2000 as 2k.
    return quantity(resources["requests"]["nvidia.com/gpucores"], ""), quantity(
        resources["requests"]["nvidia.com/gpumem"], ""
    )


def test_a_recommendation_changes_the_requests_before_scheduling(setup: Setup) -> None:
    created = made(setup, hami_pod(), "hami-initial")
    assert "nodeName" not in created["spec"]
    assert counted(created) == (60, 2000)
    assert environment(created) == {"CUDA_DEVICE_SM_LIMIT": "60", "CUDA_DEVICE_MEMORY_LIMIT_0": "2000m"}
    annotations = created["metadata"]["annotations"]
    assert annotations["clustergym.io/requested-cores"] == "80"
    assert annotations["clustergym.io/recommended-cores"] == "60"
    assert annotations["clustergym.io/agent"] == "recommender"
    asked = setup.recommender.seen[-1]
    assert (asked["owner"], asked["cores"]) == (f"hami-initial/Pod/{created['metadata']['name']}", 80)
    assert asked["shadow"] is False


def test_the_real_agent_recommends_from_the_history_of_the_owner(setup: Setup, real_agent: Agent) -> None:
    """Real servers only: feedback on earlier pods of an owner changes what the next pod requests."""
    with webhook_server(setup, "spare", "hami", f"http://{real_agent.host}:{real_agent.port}"):
        owner = {"owner": "real-initial/web", "cores": 80, "memory": 4000}
        for _ in range(40):
            status, made_before = real_agent.post("/allocate", owner)
            assert status == 200
            outcome = {"actual_usage": 10, "qos_met": True, "memory_used": 500}
            real_agent.post("/feedback", {"allocation_id": made_before["allocation_id"], **outcome})
        setup.cluster.namespace("real-initial", suite="spare", **{"clustergym.io/mode": "Initial"})
        bundle = base64.b64encode((setup.folder / "tls" / "ca.crt").read_bytes()).decode()
        one = configuration("clustergym-spare", setup.ports, bundle, "spare")
        setup.cluster.create("/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations", one)

        def granted() -> bool:
            created = made(setup, hami_pod(owner="web"), "real-initial")
            return "clustergym.io/allocation-id" in created["metadata"].get("annotations", {})

        wait_until(granted, "the configuration takes effect")
        created = made(setup, hami_pod(owner="web"), "real-initial")
        annotations = created["metadata"]["annotations"]
        cores, memory = counted(created)
        assert 1 <= cores < 80
        assert cores == int(float(annotations["clustergym.io/recommended-cores"]))
        assert memory == int(float(annotations["clustergym.io/recommended-memory"]))
        # In mode Off the agent says what it would grant, and the pod keeps its request.
        watched = made(setup, hami_pod(owner="web", mode="Off"), "real-initial")
        assert counted(watched) == (80, 4000)
        assert float(watched["metadata"]["annotations"]["clustergym.io/recommended-cores"]) < 80
        assert not [key for key in annotations if "token" in key]
        body = {"allocation_id": annotations["clustergym.io/allocation-id"], "actual_usage": 10, "qos_met": True}
        status, answer = real_agent.post("/feedback", body)
        assert (status, answer["status"]) == (200, "accepted")


def test_kai_annotations_change_before_scheduling(setup: Setup) -> None:
    fraction = pod(container(gpu=None), annotations={"gpu-fraction": "0.8", "clustergym.io/memory": "4000"})
    created = made(setup, fraction, "kai-initial")
    # The recommender grants 75 % of the cores and 50 % of the memory: a fraction must hold both.
    assert created["metadata"]["annotations"]["gpu-fraction"] == "0.6"
    assert environment(created) == {CORES: "60", MEMORY: "0=2000M"}
    memory = pod(container(gpu=None), annotations={"gpu-memory": "4000", "clustergym.io/cores": "80"})
    assert made(setup, memory, "kai-initial")["metadata"]["annotations"]["gpu-memory"] == "2000"


def test_mode_off_recommends_and_changes_nothing(setup: Setup) -> None:
    created = made(setup, hami_pod(), "hami-off")
    assert counted(created) == (80, 4000)
    assert environment(created) == {}
    annotations = created["metadata"]["annotations"]
    assert annotations["clustergym.io/recommended-cores"] == "60"
    assert annotations["clustergym.io/recommended-memory"] == "2000"
    assert annotations["clustergym.io/status"] == "mode Off: the pod runs with its request"
    assert setup.recommender.seen[-1]["shadow"] is True


def test_workloads_override_the_mode_of_their_namespace(setup: Setup) -> None:
    assert counted(made(setup, hami_pod(mode="Off"), "hami-initial")) == (80, 4000)
    assert counted(made(setup, hami_pod(mode="Initial"), "hami-off")) == (60, 2000)


def test_requests_stay_within_the_bounds_of_the_workload(setup: Setup) -> None:
    created = made(setup, hami_pod(min_allowed_cores="70", max_allowed_memory="1500"), "hami-initial")
    assert counted(created) == (70, 1500)


@pytest.mark.parametrize("mode", ["500", "slow", "greedy", "garbage"])
def test_if_the_recommender_fails_the_request_stands(setup: Setup, mode: str) -> None:
    setup.recommender.mode = mode
    try:
        created = made(setup, hami_pod(), "hami-initial")
    finally:
        setup.recommender.mode = "good"
    assert counted(created) == (80, 4000)
    assert environment(created)["CUDA_DEVICE_SM_LIMIT"] == "80"
    assert created["metadata"]["annotations"]["clustergym.io/status"].startswith("the pod runs with its request: the ")


def test_a_dry_run_does_not_ask_the_recommender(setup: Setup) -> None:
    before = len(setup.recommender.seen)
    assert counted(made(setup, hami_pod(), "hami-initial", dryRun="All")) == (80, 4000)
    assert len(setup.recommender.seen) == before


def test_namespaces_that_did_not_opt_in_never_reach_the_webhook(setup: Setup) -> None:
    """A frozen webhook cannot delay them."""
    before = setup.decisions("mps")
    assert environment(made(setup, pod(), "not-opted-in")) == {}
    assert setup.decisions("mps") == before
    for i, namespace in enumerate(("mps-off", "mps")):
        made(setup, pod(), namespace)
        assert setup.decisions("mps") == before + i + 1


def test_a_frozen_webhook_does_not_delay_namespaces_that_did_not_opt_in(setup: Setup) -> None:
    """The API server counts its calls of webhooks: none for a pod of another namespace, that is created."""
    frozen = setup.processes["mps"]
    frozen.send_signal(signal.SIGSTOP)
    try:
        before = setup.calls()
        made(setup, pod(), "not-opted-in")
        made(setup, pod(label=None), "plain")
        assert setup.calls() == before
        # The webhook is frozen indeed: a pod that opted in is created without it, after the timeout.
        assert environment(made(setup, pod())) == {}
        assert setup.calls() > before
    finally:
        frozen.send_signal(signal.SIGCONT)
    assert environment(made(setup, pod())) == {CORES: "80", MEMORY: "0=4000M"}


# Grants of the agent of a node


def test_a_grant_is_divided_among_containers(setup: Setup) -> None:
    subject = pod(container(), container("second"), init=[container("init"), container("wait", gpu=None)])
    found = made(setup, on_node(subject, "node-good"))
    assert environment(found) == environment(found, index=1) == {CORES: "30", MEMORY: "0=1000M"}
    assert environment(found, "initContainers") == {CORES: "60", MEMORY: "0=2000M"}
    assert environment(found, "initContainers", 1) == {}


def test_a_patch_adds_missing_parents(setup: Setup) -> None:
    one = container()
    one["resources"]["limits"] |= {"nvidia.com/gpucores": "50", "nvidia.com/gpumem": "1000"}
    assert environment(made(setup, pod(one, annotations={}))) == {CORES: "50", MEMORY: "0=1000M"}


def test_variables_of_the_user_are_not_changed(setup: Setup) -> None:
    before = setup.request_count()
    subject = on_node(pod(container(env=[{"name": CORES, "value": "33"}])), "node-good")
    assert environment(made(setup, subject)) == {CORES: "33"}
    assert setup.request_count() == before


def test_warnings_reach_the_client(setup: Setup) -> None:
    subject = pod(name=next(NAMES))
    response = setup.cluster.post("/api/v1/namespaces/mps/pods", subject)
    (warning,) = response.headers.get_list("Warning")
    assert "set to the request, 80 % and 4000 MB" in warning
    response = setup.cluster.post("/api/v1/namespaces/mps/pods", on_node(pod(name=next(NAMES)), "node-good"))
    assert "set to 60 % of 80 % and 2000 of 4000 MB" in response.headers["Warning"]
    subject = pod(name=next(NAMES), annotations={})
    response = setup.cluster.post("/api/v1/namespaces/mps/pods", subject)
    assert "set annotation clustergym.io/cores" in response.headers["Warning"]


def test_unlabelled_pods_are_not_changed(setup: Setup) -> None:
    before = setup.request_count()
    found = made(setup, on_node(pod(label=None), "node-good"))
    assert environment(found) == {}
    assert set(found["metadata"]["annotations"]) == {"clustergym.io/cores", "clustergym.io/memory"}
    assert setup.request_count() == before


def test_pods_in_kube_system_are_not_changed(setup: Setup) -> None:
    before = setup.request_count()
    found = made(setup, on_node(pod(), "node-good"), "kube-system")
    assert environment(found) == {}
    assert set(found["metadata"]["annotations"]) == {"clustergym.io/cores", "clustergym.io/memory"}
    assert setup.request_count() == before


def test_a_dry_run_shows_the_change_and_stores_nothing(setup: Setup) -> None:
    before = setup.request_count()
    shown = made(setup, on_node(pod(), "node-good"), dryRun="All")
    assert environment(shown) == {CORES: "80", MEMORY: "0=4000M"}
    name = shown["metadata"]["name"]
    assert setup.cluster.client.get(f"/api/v1/namespaces/mps/pods/{name}").status_code == 404
    assert setup.request_count() == before


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("down", "the agent on node-down cannot be reached (ConnectError)"),
        ("slow", "the agent on node-slow did not respond in time"),
        ("401", "the agent on node-401 answered 401"),
        ("500", "the agent on node-500 answered 500"),
        ("garbage", "the agent on node-garbage sent an invalid allocation"),
        ("empty", "the agent on node-empty sent an invalid allocation"),
        ("greedy", "the agent granted 100 % and 2000 MB of the requested 80 % and 4000 MB"),
        ("injection", "the agent on node-injection sent an invalid allocation"),
        ("unknown", "the API server (node node-unknown) answered 404"),
    ],
)
def test_if_the_agent_fails_the_pod_gets_its_request(setup: Setup, mode: str, reason: str) -> None:
    # The slow agent answers after five seconds. The webhook waits for two, so it does not get the grant.
    found = made(setup, on_node(pod(), f"node-{mode}"))
    assert environment(found) == {CORES: "80", MEMORY: "0=4000M"}
    assert reason in found["metadata"]["annotations"]["clustergym.io/status"]
    assert "clustergym.io/allocation-id" not in found["metadata"]["annotations"]


def test_pods_are_admitted_while_the_webhook_is_down(setup: Setup) -> None:
    assert environment(made(setup, pod(), "down")) == {}


@pytest.mark.parametrize("policy", ["Fail", "Ignore"])
@pytest.mark.parametrize("row", TABLE)
def test_the_contract_table(setup: Setup, row: str, policy: str) -> None:
    """What an API server does with a faulty webhook: why we use Ignore and apply each patch before it is sent."""
    subject = pod(name=next(NAMES), label=None, labels={"row": f"{row}-{policy}"})
    began = time.monotonic()
    response = setup.cluster.post("/api/v1/namespaces/plain/pods", subject)
    assert response.status_code == TABLE[row][policy == "Ignore"], response.text
    if row == "slow":
        assert time.monotonic() - began >= 1
    if response.status_code == 201:
        assert environment(response.json()) == {}


def test_a_container_that_a_later_webhook_adds_is_managed(setup: Setup) -> None:
    created = made(setup, pod(labels={"sidecar": "true"}))
    assert [one["name"] for one in created["spec"]["containers"]] == ["main", "side"]
    assert environment(created, index=1)[CORES] == "40"
    names = [variable["name"] for variable in created["spec"]["containers"][0]["env"]]
    assert names == [CORES, MEMORY]


def test_variables_cannot_be_changed_after_creation(setup: Setup) -> None:
    # This is why the variables read annotations.
    created = made(setup, pod())
    patch = [{"op": "add", "path": "/spec/containers/0/env/0/value", "value": "5"}]
    name = created["metadata"]["name"]
    headers = {"Content-Type": "application/json-patch+json"}
    response = setup.cluster.client.patch(f"/api/v1/namespaces/mps/pods/{name}", json=patch, headers=headers)
    assert response.status_code == 422


def test_the_role_allows_only_to_get_nodes(setup: Setup) -> None:
    """The webhook of these tests uses the ClusterRole of deploy/."""
    headers = {"Authorization": "Bearer webhook-token"}
    client = setup.cluster.client
    assert client.get("/api/v1/nodes/node-good", headers=headers).status_code == 200
    for path in (
        "/api/v1/pods",
        "/api/v1/namespaces/mps/pods/x",
        "/api/v1/nodes",
        "/api/v1/secrets",
        "/api/v1/namespaces/mps/configmaps/x",
    ):
        assert client.get(path, headers=headers).status_code == 403, path
    assert client.post("/api/v1/namespaces/mps/pods", json=pod(), headers=headers).status_code == 403


def test_the_api_server_accepts_the_manifests(setup: Setup) -> None:
    rendered = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / "deploy")], capture_output=True, text=True, check=False
    )
    assert rendered.returncode == 0, rendered.stderr
    accepted = []
    for one in yaml.safe_load_all(rendered.stdout):
        if one["kind"] == "PodDisruptionBudget":
            one["apiVersion"] = "policy/v1beta1"  # this API server is 1.20, and v1 came with 1.21
        group = "/api/v1" if one["apiVersion"] == "v1" else f"/apis/{one['apiVersion']}"
        namespace = one["metadata"].get("namespace")
        inside = f"/namespaces/{namespace}" if namespace else ""
        plural = re.sub("ys$", "ies", one["kind"].lower() + "s")
        response = setup.cluster.post(f"{group}{inside}/{plural}", one, dryRun="All")
        # The namespace and the roles exist already, because these tests use them.
        assert response.status_code in (201, 409), response.text
        accepted.append(one["kind"])
    assert set(accepted) >= {
        "DaemonSet",
        "StatefulSet",
        "Deployment",
        "Service",
        "PodDisruptionBudget",
        "MutatingWebhookConfiguration",
    }
