"""Decisions of the webhook: injected variables, requests, and what is never changed."""

from __future__ import annotations

from typing import Any

import pytest

from clustergym.kubernetes.patches import apply_patch
from clustergym.kubernetes.requests import NotManageable, containers_of, gpu_request, owner_of, quantity
from webhook_pods import HAMI, MPS, admit_pod, admitted, container, limits, pod, variables


def test_variables_read_annotations_that_hold_the_request_at_first() -> None:
    decision = admit_pod(pod(), "team", MPS)
    found = apply_patch(pod(), decision.patch)
    assert decision.outcome == "injected"
    assert found["spec"]["containers"][0]["env"] == [
        {
            "name": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['cores.clustergym.io/main']"}},
        },
        {
            "name": "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['memory.clustergym.io/main']"}},
        },
    ]
    assert variables(found) == {
        "main": {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "80", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4000M"}
    }
    assert found["metadata"]["annotations"]["clustergym.io/backend"] == "mps"
    assert decision.warnings == [
        "clustergym: main: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE and CUDA_MPS_PINNED_DEVICE_MEM_LIMIT set to the "
        "request, 80 % and 4000 MB"
    ]


def test_hami_has_its_own_names_and_units() -> None:
    assert variables(admitted(pod(), HAMI)) == {
        "main": {"CUDA_DEVICE_SM_LIMIT": "80", "CUDA_DEVICE_MEMORY_LIMIT_0": "4000m"}
    }


@pytest.mark.parametrize("label", [None, "false", "True", "yes", ""])
def test_only_the_exact_label_opts_in(label: str | None) -> None:
    decision = admit_pod(pod(label=label), "team", MPS)
    assert (decision.outcome, decision.patch, decision.warnings) == ("not-opted-in", [], [])


@pytest.mark.parametrize("namespace", ["kube-system", "kube-public", "kube-node-lease"])
def test_the_control_plane_is_never_changed(namespace: str) -> None:
    assert admit_pod(pod(), namespace, MPS).patch == []


@pytest.mark.parametrize("backend", [MPS, HAMI])
def test_a_second_call_changes_nothing(backend: Any) -> None:
    once = admitted(pod(container(), container("side"), init=[container("init")]), backend)
    again = admit_pod(once, "team", backend)
    assert (again.outcome, again.patch) == ("already-injected", [])


def test_an_injection_is_recognised_after_the_api_server_added_apiversion() -> None:
    once = admitted(pod())
    for variable in once["spec"]["containers"][0]["env"]:
        variable["valueFrom"]["fieldRef"]["apiVersion"] = "v1"
    assert admit_pod(once, "team", MPS).outcome == "already-injected"


def test_a_container_added_by_a_later_webhook_is_injected_on_reinvocation() -> None:
    once = admitted(pod())
    once["spec"]["containers"].append(container("side"))
    found = admitted(once)
    # The first value stays; the new container gets its part of the request.
    assert variables(found)["main"]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "80"
    assert variables(found)["side"]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"


@pytest.mark.parametrize("name", MPS.variables)
def test_variables_of_the_user_are_never_overridden(name: str) -> None:
    subject = pod(container(env=[{"name": name, "value": "33"}]))
    decision = admit_pod(subject, "team", MPS)
    assert decision.patch == []
    assert decision.warnings == [f"clustergym: main sets {name} itself, so container main is not managed"]


def test_annotations_of_the_user_are_never_overridden() -> None:
    annotations = {"clustergym.io/cores": "80", "clustergym.io/memory": "4000", "cores.clustergym.io/main": "5"}
    decision = admit_pod(pod(annotations=annotations), "team", MPS)
    assert decision.patch == []
    assert "cores.clustergym.io/main itself" in decision.warnings[0]


def test_containers_with_envfrom_are_managed_only_if_named() -> None:
    subject = pod(container(envFrom=[{"configMapRef": {"name": "settings"}}]))
    decision = admit_pod(subject, "team", MPS)
    assert decision.patch == []
    assert "envFrom" in decision.warnings[0]
    subject["metadata"]["annotations"]["clustergym.io/containers"] = "main"
    assert "main" in variables(admitted(subject))


def test_other_variables_and_annotations_stay() -> None:
    subject = pod(container(env=[{"name": "MODEL", "value": "a"}]))
    subject["metadata"]["annotations"]["team/owner"] = "vision"
    found = admitted(subject)
    assert variables(found)["main"]["MODEL"] == "a"
    assert found["metadata"]["annotations"]["team/owner"] == "vision"


def test_gpu_containers_or_the_named_ones_are_managed() -> None:
    two = pod(container(), container("log", gpu=None))
    assert set(variables(admitted(two))) == {"main"}
    two["metadata"]["annotations"]["clustergym.io/containers"] = "log"
    assert set(variables(admitted(two))) == {"log"}


@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        (pod(container(gpu=None)), "no container requests nvidia.com/gpu"),
        (pod(annotations={}), "set annotation clustergym.io/cores (% of one GPU)"),
        (pod(annotations={"clustergym.io/cores": "50"}), "set annotation clustergym.io/memory (MB)"),
        (pod(annotations={"clustergym.io/cores": "x", "clustergym.io/memory": "1"}), "clustergym.io/cores is 'x'"),
        (pod(annotations={"clustergym.io/cores": "0", "clustergym.io/memory": "1"}), "0 % of a GPU: expected 1 to 100"),
        (pod(annotations={"clustergym.io/cores": "101", "clustergym.io/memory": "1"}), "101 % of a GPU"),
        (pod(annotations={"clustergym.io/cores": "50", "clustergym.io/memory": "0"}), "0 MB of GPU memory"),
        (pod(container(gpu=2)), "requests 2 GPUs: expected 1"),
        (
            pod(annotations={"clustergym.io/containers": "gone", "clustergym.io/cores": "5"}),
            "clustergym.io/containers names gone, but the pod has main",
        ),
    ],
)  # fmt: skip
def test_pods_without_a_valid_request_are_admitted_with_a_reason(subject: dict[str, Any], reason: str) -> None:
    decision = admit_pod(subject, "team", MPS)
    assert decision.patch == []
    assert any(reason in warning for warning in decision.warnings), decision.warnings


def test_warnings_are_short_enough_for_an_api_server() -> None:
    names = [f"container-with-a-rather-long-name-{i}" for i in range(30)]
    decision = admit_pod(pod(*(container(name) for name in names)), "team", MPS)
    assert decision.outcome == "injected"
    assert all(len(warning) <= 256 and warning.startswith("clustergym: ") for warning in decision.warnings)


# Requests


def test_limits_add_up_as_in_the_scheduler() -> None:
    subject = pod(
        limits("a", 30, 1000), limits("b", 20, 2000), init=[limits("warm", 60, 500), limits("small", 10, 100)],
        annotations={},
    )  # fmt: skip
    found = variables(admitted(subject, HAMI))
    # The containers request 50 % and 3000 MB together. The larger init container requests 60 %, so the pod does too.
    request = gpu_request(subject, "team", list(containers_of(subject)))
    assert (request.cores, request.memory_mb) == (60, 3000)
    # No container gets more than its own limit, although a and b together could use the 60 %.
    assert found["a"] == {"CUDA_DEVICE_SM_LIMIT": "30", "CUDA_DEVICE_MEMORY_LIMIT_0": "1000m"}
    assert found["b"] == {"CUDA_DEVICE_SM_LIMIT": "20", "CUDA_DEVICE_MEMORY_LIMIT_0": "2000m"}
    assert found["warm"] == {"CUDA_DEVICE_SM_LIMIT": "60", "CUDA_DEVICE_MEMORY_LIMIT_0": "500m"}
    assert found["small"] == {"CUDA_DEVICE_SM_LIMIT": "10", "CUDA_DEVICE_MEMORY_LIMIT_0": "100m"}


def test_a_sidecar_adds_to_the_request() -> None:
    subject = pod(limits("a", 30, 1000), init=[limits("side", 20, 500, restartPolicy="Always")], annotations={})
    request = gpu_request(subject, "team", list(containers_of(subject)))
    assert (request.cores, request.memory_mb) == (50, 1500)


def test_an_init_container_can_use_the_whole_request() -> None:
    found = variables(admitted(pod(container(), init=[container("warm")])))
    assert found["warm"] == found["main"]


@pytest.mark.parametrize(
    ("text", "value"), [("3000", 3000), (3, 3), ("3k", 3000), ("4Ki", 4096), ("1.5", 1.5), (" 7 ", 7)]
)
def test_quantities(text: Any, value: float) -> None:
    assert quantity(text, "x") == value


@pytest.mark.parametrize("text", ["", "-1", "1e3", "nan", "inf", "3m", "0x10", None, "1 2"])
def test_invalid_quantities_are_refused(text: Any) -> None:
    with pytest.raises(NotManageable, match="expected a number"):
        quantity(text, "x")


def test_owner_is_the_workload_in_its_namespace() -> None:
    def owned(kind: str, name: str, **labels: str) -> dict[str, Any]:
        return pod(labels=labels, ownerReferences=[{"kind": kind, "name": name, "controller": True}])

    assert owner_of(pod(), "team") == "team/Pod/train"
    # The same before and after the API server has generated the name.
    assert owner_of({"metadata": {"generateName": "run-"}}, "team") == "team/Pod/run-"
    assert owner_of({"metadata": {"generateName": "run-", "name": "run-x7k2p"}}, "team") == "team/Pod/run-"
    assert owner_of(owned("Job", "nightly"), "team") == "team/Job/nightly"
    assert owner_of(owned("ReplicaSet", "web-5d8f", **{"pod-template-hash": "5d8f"}), "team") == "team/Deployment/web"
    assert owner_of(owned("ReplicaSet", "bare"), "team") == "team/ReplicaSet/bare"
    assert owner_of(pod(annotations={"clustergym.io/owner": "other/x"}), "team") == "team/other/x"
