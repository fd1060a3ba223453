"""The webhooks with a real kube-apiserver: what it stores and refuses, and that failures never block a pod."""

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
from clustergym.kubernetes.requests import quantity
from processes import wait_until
from webhook_cluster import (
    CORES,
    MEMORY,
    NAMES,
    ROOT,
    TABLE,
    Setup,
    bound,
    configuration,
    environment,
    made,
    webhook_server,
)
from webhook_cluster import real_agent as real_agent  # a fixture
from webhook_cluster import setup as setup  # a fixture
from webhook_pods import container, pod


def test_a_labelled_pod_gets_variables_when_created_and_a_grant_when_bound(setup: Setup) -> None:
    created = made(setup, pod())
    assert environment(created) == {CORES: "80", MEMORY: "0=4000M"}
    found = bound(setup, created, "node-good")
    assert environment(found) == {CORES: "60", MEMORY: "0=2000M"}
    annotations = found["metadata"]["annotations"]
    uid = created["metadata"]["uid"]
    assert annotations["clustergym.io/allocation-id"] == f"id-{uid}.node-good"
    assert annotations["clustergym.io/granted-cores"] == "60"
    assert annotations["clustergym.io/granted-memory"] == "2000"
    assert annotations["clustergym.io/policy-version"] == "7"
    assert annotations["clustergym.io/status"] == "granted"
    assert setup.agents["good"].seen[-1] == {
        "owner": f"mps/Pod/{created['metadata']['name']}", "cores": 80, "memory": 4000,
        "qos_class": "latency-sensitive", "request_id": f"{uid}@node-good", "shadow": False,
        "min_cores": 0, "max_cores": 80, "min_memory": 0, "max_memory": 4000,
    }  # fmt: skip


def test_the_real_agent_grants_a_share_and_accepts_feedback(setup: Setup, real_agent: Agent) -> None:
    """From the creation of a pod to the feedback on its allocation, with real servers only."""
    found = bound(setup, made(setup, pod()), "node-real")
    annotations = found["metadata"]["annotations"]
    assert annotations["clustergym.io/status"] == "granted"
    cores = float(annotations["clustergym.io/granted-cores"])
    memory = float(annotations["clustergym.io/granted-memory"])
    assert 10 <= cores <= 80
    assert environment(found) == {CORES: str(int(cores)), MEMORY: f"0={int(memory)}M"}
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
    assert annotations["clustergym.io/recommendation-id"].startswith("id-")
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
            return "clustergym.io/recommendation-id" in created["metadata"].get("annotations", {})

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
        body = {"allocation_id": annotations["clustergym.io/recommendation-id"], "actual_usage": 10, "qos_met": True}
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
    before = setup.request_count(), setup.decisions("hami", "bindings")
    created = made(setup, hami_pod(), "hami-off")
    assert counted(created) == (80, 4000)
    assert environment(created) == {}
    annotations = created["metadata"]["annotations"]
    assert annotations["clustergym.io/recommended-cores"] == "60"
    assert annotations["clustergym.io/recommended-memory"] == "2000"
    assert annotations["clustergym.io/status"] == "mode Off: the pod runs with its request"
    assert setup.recommender.seen[-1]["shadow"] is True
    found = bound(setup, created, "node-good")
    assert "clustergym.io/allocation-id" not in found["metadata"]["annotations"]
    assert (setup.request_count(), setup.decisions("hami", "bindings")) == before


def test_mode_initial_is_not_changed_at_binding(setup: Setup) -> None:
    before = setup.request_count(), setup.decisions("hami", "bindings")
    found = bound(setup, made(setup, hami_pod(), "hami-initial"), "node-good")
    assert environment(found)["CUDA_DEVICE_SM_LIMIT"] == "60"
    assert (setup.request_count(), setup.decisions("hami", "bindings")) == before


def test_mode_auto_may_only_tighten_at_binding(setup: Setup) -> None:
    before = setup.decisions("hami", "bindings")
    created = made(setup, hami_pod(max_allowed_cores="70"), "hami-auto")
    assert counted(created) == (60, 2000)
    found = bound(setup, created, "node-good")
    # The agent of the node grants 60 % and 2000 MB too. It was told what it may grant at most.
    assert setup.agents["good"].seen[-1]["max_cores"] == 60
    assert environment(found) == {"CUDA_DEVICE_SM_LIMIT": "60", "CUDA_DEVICE_MEMORY_LIMIT_0": "2000m"}
    assert found["metadata"]["annotations"]["clustergym.io/status"] == "granted"
    assert setup.decisions("hami", "bindings") == before + 1


def test_workloads_override_the_mode_of_their_namespace(setup: Setup) -> None:
    assert counted(made(setup, hami_pod(mode="Off"), "hami-auto")) == (80, 4000)
    assert counted(made(setup, hami_pod(mode="Initial"), "hami-off")) == (60, 2000)
    before = setup.request_count()
    bound(setup, made(setup, hami_pod(mode="Initial"), "hami-auto"), "node-good")
    assert setup.request_count() == before


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


def test_namespaces_that_did_not_opt_in_never_reach_the_webhooks(setup: Setup) -> None:
    """A frozen webhook cannot delay them. Bindings are sent in mode Auto only."""
    before = setup.decisions("mps", "pods"), setup.decisions("mps", "bindings")
    found = bound(setup, made(setup, pod(), "not-opted-in"), "node-good")
    assert environment(found) == {}
    assert (setup.decisions("mps", "pods"), setup.decisions("mps", "bindings")) == before
    for namespace, bindings in (("mps-off", 0), ("mps-initial", 0), ("mps", 1)):
        pods, count = setup.decisions("mps", "pods"), setup.decisions("mps", "bindings")
        bound(setup, made(setup, pod(), namespace), "node-good")
        assert setup.decisions("mps", "pods") == pods + 1
        assert setup.decisions("mps", "bindings") == count + bindings


def test_a_frozen_webhook_does_not_delay_namespaces_that_did_not_opt_in(setup: Setup) -> None:
    """The API server counts its calls of webhooks: none for a pod of another namespace, created and bound."""
    frozen = setup.processes["mps"]
    frozen.send_signal(signal.SIGSTOP)
    try:
        before = setup.calls()
        bound(setup, made(setup, pod(), "not-opted-in"), "node-good")
        bound(setup, made(setup, pod(label=None), "plain"), "node-good")
        assert setup.calls() == before
        # The webhook is frozen indeed: a pod that opted in is created without it, after the timeout.
        assert environment(made(setup, pod())) == {}
        assert setup.calls() > before
    finally:
        frozen.send_signal(signal.SIGCONT)
    assert environment(made(setup, pod())) == {CORES: "80", MEMORY: "0=4000M"}


# Grants at binding


def test_the_hami_backend_sets_its_variables(setup: Setup) -> None:
    found = bound(setup, made(setup, pod(), "hami-auto"), "node-good")
    assert environment(found) == {"CUDA_DEVICE_SM_LIMIT": "60", "CUDA_DEVICE_MEMORY_LIMIT_0": "2000m"}


def test_a_grant_is_divided_among_containers(setup: Setup) -> None:
    created = made(setup, pod(container(), container("second"), init=[container("init"), container("wait", gpu=None)]))
    found = bound(setup, created, "node-good")
    assert environment(found) == environment(found, index=1) == {CORES: "30", MEMORY: "0=1000M"}
    assert environment(found, "initContainers") == {CORES: "60", MEMORY: "0=2000M"}
    assert environment(found, "initContainers", 1) == {}


def test_a_patch_adds_missing_parents(setup: Setup) -> None:
    one = container()
    one["resources"]["limits"] |= {"nvidia.com/gpucores": "50", "nvidia.com/gpumem": "1000"}
    assert environment(made(setup, pod(one, annotations={}))) == {CORES: "50", MEMORY: "0=1000M"}


def test_variables_of_the_user_are_not_changed(setup: Setup) -> None:
    created = made(setup, pod(container(env=[{"name": CORES, "value": "33"}])))
    before = setup.request_count()
    assert environment(bound(setup, created, "node-good")) == {CORES: "33"}
    assert setup.request_count() == before


def test_warnings_reach_the_client(setup: Setup) -> None:
    subject = pod(name=next(NAMES))
    response = setup.cluster.post("/api/v1/namespaces/mps/pods", subject)
    (warning,) = response.headers.get_list("Warning")
    assert "will be set to what the node's agent grants, at most the requested 80 % and 4000 MB" in warning
    response = setup.cluster.bind("mps", subject["metadata"]["name"], "node-good")
    assert "granted 60 % of 80 % and 2000 of 4000 MB" in response.headers["Warning"]
    subject = pod(name=next(NAMES), annotations={})
    response = setup.cluster.post("/api/v1/namespaces/mps/pods", subject)
    assert "set annotation clustergym.io/cores" in response.headers["Warning"]


def test_unlabelled_pods_are_not_changed(setup: Setup) -> None:
    before = setup.request_count()
    found = bound(setup, made(setup, pod(label=None)), "node-good")
    assert environment(found) == {}
    assert set(found["metadata"]["annotations"]) == {"clustergym.io/cores", "clustergym.io/memory"}
    assert setup.request_count() == before


def test_pods_in_kube_system_are_not_changed(setup: Setup) -> None:
    before = setup.request_count()
    found = bound(setup, made(setup, pod(), "kube-system"), "node-good")
    assert environment(found) == {}
    assert set(found["metadata"]["annotations"]) == {"clustergym.io/cores", "clustergym.io/memory"}
    assert setup.request_count() == before


def test_a_dry_run_shows_the_change_and_stores_nothing(setup: Setup) -> None:
    before = setup.request_count()
    shown = made(setup, pod(), dryRun="All")
    assert environment(shown) == {CORES: "80", MEMORY: "0=4000M"}
    name = shown["metadata"]["name"]
    assert setup.cluster.client.get(f"/api/v1/namespaces/mps/pods/{name}").status_code == 404
    created = made(setup, pod())
    response = setup.cluster.bind("mps", created["metadata"]["name"], "node-good", dryRun="All")
    assert response.status_code == 201, response.text
    found = setup.cluster.pod("mps", created["metadata"]["name"])
    assert "nodeName" not in found["spec"]
    assert "clustergym.io/allocation-id" not in found["metadata"]["annotations"]
    assert setup.request_count() == before


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("down", "the agent on node-down cannot be reached (ConnectError)"),
        ("slow", "the agent on node-slow did not respond within"),
        ("401", "the agent on node-401 answered 401"),
        ("500", "the agent on node-500 answered 500"),
        ("garbage", "the agent on node-garbage sent a response that is not JSON"),
        ("empty", "the agent on node-empty did not send an allocation"),
        ("greedy", "the agent granted 160 % and 2000 MB of the requested 80 % and 4000 MB"),
        ("injection", "the agent on node-injection sent an invalid allocation"),
    ],
)
def test_if_the_agent_fails_the_pod_is_bound_with_its_request(setup: Setup, mode: str, reason: str) -> None:
    created = made(setup, pod())
    # The slow agent answers after five seconds. The webhook waits for two, so it does not get the grant.
    found = bound(setup, created, f"node-{mode}")
    assert environment(found) == {CORES: "80", MEMORY: "0=4000M"}
    assert reason in found["metadata"]["annotations"]["clustergym.io/status"]
    assert "clustergym.io/allocation-id" not in found["metadata"]["annotations"]


def test_an_unknown_node_does_not_block_the_binding(setup: Setup) -> None:
    found = bound(setup, made(setup, pod()), "node-unknown")
    status = found["metadata"]["annotations"]["clustergym.io/status"]
    assert status == "not reduced at binding: the API server (node node-unknown) answered 404"


def test_pods_are_admitted_and_bound_while_the_webhook_is_down(setup: Setup) -> None:
    found = bound(setup, made(setup, pod(), "down"), "node-good")
    assert environment(found) == {}


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


def test_bindings_of_the_older_resource_are_handled(setup: Setup) -> None:
    created = made(setup, pod())
    name = created["metadata"]["name"]
    body = {
        "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name, "namespace": "mps"},
        "target": {"apiVersion": "v1", "kind": "Node", "name": "node-good"},
    }  # fmt: skip
    assert setup.cluster.post("/api/v1/namespaces/mps/bindings", body).status_code == 201
    assert environment(setup.cluster.pod("mps", name)) == {CORES: "60", MEMORY: "0=2000M"}


def test_the_role_allows_only_to_get_pods_and_nodes(setup: Setup) -> None:
    """The webhooks of these tests use the ClusterRole of deploy/."""
    headers = {"Authorization": "Bearer webhook-token"}
    client = setup.cluster.client
    assert client.get("/api/v1/nodes/node-good", headers=headers).status_code == 200
    for path in ("/api/v1/pods", "/api/v1/nodes", "/api/v1/secrets", "/api/v1/namespaces/mps/configmaps/x"):
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
