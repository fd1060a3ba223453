"""Decisions of the webhooks: injected variables, requests, grants, and what is never changed."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym.webhook import BACKENDS, Decision, Grant, grant_decision, plan_binding, plan_pod
from clustergym.webhook import admit_pod as admit_planned
from clustergym.webhook.decisions import injected_variables, request_decision
from clustergym.webhook.patches import add_annotations, apply_patch, escape
from clustergym.webhook.requests import NotManageable, containers_of, gpu_request, owner_of, quantity
from clustergym.webhook.review import BadReview, duration_s, make_response, parse
from webhook_pods import container, pod

MPS, HAMI, KAI = BACKENDS["mps"], BACKENDS["hami"], BACKENDS["kai"]


def admit_pod(
    subject: dict[str, Any], namespace: str, backend: Any, mode: Any = "Auto", grant: Grant | None = None
) -> Decision:
    """The decision of the pod webhook if the recommender answers with this grant."""
    plan = plan_pod(subject, namespace, backend, mode)
    return plan if isinstance(plan, Decision) else admit_planned(subject, plan, grant)


def admitted(
    subject: dict[str, Any], backend: Any = MPS, namespace: str = "team", mode: Any = "Auto", grant: Grant | None = None
) -> dict[str, Any]:
    return apply_patch(subject, admit_pod(subject, namespace, backend, mode, grant).patch)


def variables(found: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Values of the variables per container; a fieldRef is replaced by the annotation that it reads."""
    annotations = found["metadata"].get("annotations", {})
    result: dict[str, dict[str, str]] = {}
    for one in containers_of(found):
        for variable in one.spec.get("env") or []:
            path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            value = variable["value"] if path is None else annotations[path.split("'")[1]]
            result.setdefault(one.name, {})[variable["name"]] = value
    return result


def binding(name: str = "train", node: str = "node-1", **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name, **metadata},
        "target": {"kind": "Node", "name": node},
    }  # fmt: skip


# The pod webhook


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
        "clustergym: main: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE and CUDA_MPS_PINNED_DEVICE_MEM_LIMIT will be set to what "
        "the node's agent grants, at most the requested 80 % and 4000 MB"
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
    assert plan_binding(admitted(pod()), namespace) is None


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


def limits(name: str, cores: int, memory: int, **extra: Any) -> dict[str, Any]:
    one = container(name, **extra)
    one["resources"]["limits"] |= {"nvidia.com/gpucores": str(cores), "nvidia.com/gpumem": str(memory)}
    return one


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


# Modes, recommendations and bounds

GRANT = Grant("rec-1", 60, 1000, "7")


def resources_of(found: dict[str, Any], index: int = 0) -> dict[str, Any]:
    resources: dict[str, Any] = found["spec"]["containers"][index]["resources"]
    return resources


def test_mode_off_only_annotates() -> None:
    subject = pod(limits("main", 80, 4000), annotations={})
    decision = admit_pod(subject, "team", HAMI, "Off", GRANT)
    assert (decision.outcome, decision.warnings) == ("recommended", [])
    found = apply_patch(subject, decision.patch)
    assert found["spec"] == subject["spec"]
    assert found["metadata"]["annotations"] == {
        "clustergym.io/mode": "Off", "clustergym.io/recommendation-id": "rec-1", "clustergym.io/policy-version": "7",
        "clustergym.io/requested-cores": "80", "clustergym.io/requested-memory": "4000",
        "clustergym.io/recommended-cores": "60", "clustergym.io/recommended-memory": "1000",
        "clustergym.io/status": "mode Off: the pod runs with its request",
    }  # fmt: skip
    assert plan_binding(found, "team") is None
    assert admit_pod(found, "team", HAMI, "Off", GRANT).patch == []


@pytest.mark.parametrize(
    ("namespace_mode", "annotation", "mode"),
    [("Off", None, "Off"), ("Off", "Initial", "Initial"), ("Auto", "Off", "Off"), ("Initial", None, "Initial")],
)
def test_the_annotation_of_a_pod_overrides_the_mode_of_its_namespace(
    namespace_mode: Any, annotation: str | None, mode: str
) -> None:
    subject = pod()
    if annotation is not None:
        subject["metadata"]["annotations"]["clustergym.io/mode"] = annotation
    found = admitted(subject, HAMI, mode=namespace_mode, grant=GRANT)
    assert found["metadata"]["annotations"]["clustergym.io/mode"] == mode
    assert ("env" in found["spec"]["containers"][0]) == (mode != "Off")
    assert plan_binding(found, "team") is None


def test_auto_in_a_namespace_that_is_not_auto_is_initial_with_a_warning() -> None:
    subject = pod()
    subject["metadata"]["annotations"]["clustergym.io/mode"] = "Auto"
    decision = admit_pod(subject, "team", HAMI, "Initial", GRANT)
    assert decision.outcome == "granted"
    assert "mode Auto acts as Initial" in decision.warnings[-1]


def test_an_unknown_mode_changes_nothing() -> None:
    subject = pod()
    subject["metadata"]["annotations"]["clustergym.io/mode"] = "auto"
    decision = admit_pod(subject, "team", MPS, "Auto", GRANT)
    assert decision.patch == []
    assert "clustergym.io/mode is 'auto': expected Off, Initial, Auto" in decision.warnings[0]


def test_hami_limits_are_set_before_scheduling() -> None:
    found = admitted(pod(limits("main", 80, 4000), annotations={}), HAMI, mode="Initial", grant=GRANT)
    counted = {"nvidia.com/gpucores": "60", "nvidia.com/gpumem": "1000"}
    assert resources_of(found) == {"limits": {"nvidia.com/gpu": "1", **counted}, "requests": counted}
    assert variables(found)["main"] == {"CUDA_DEVICE_SM_LIMIT": "60", "CUDA_DEVICE_MEMORY_LIMIT_0": "1000m"}


def test_hami_limits_are_added_to_a_pod_that_has_only_annotations() -> None:
    found = admitted(pod(), HAMI, mode="Initial", grant=GRANT)
    assert resources_of(found)["limits"] == {
        "nvidia.com/gpu": "1", "nvidia.com/gpucores": "60", "nvidia.com/gpumem": "1000",
    }  # fmt: skip
    assert "nvidia.com/gpucores" not in resources_of(admitted(pod(), MPS, grant=GRANT))["limits"]


def test_a_percentage_of_memory_is_not_combined_with_megabytes() -> None:
    one = container()
    one["resources"]["limits"]["nvidia.com/gpumem-percentage"] = "50"
    found = admitted(pod(one), HAMI, mode="Initial", grant=GRANT)
    assert "nvidia.com/gpumem" not in resources_of(found)["limits"]


def test_limits_of_several_containers_share_the_grant() -> None:
    subject = pod(limits("a", 60, 3000), limits("b", 20, 1000), annotations={})
    found = admitted(subject, HAMI, mode="Initial", grant=Grant("r", 40, 2000, "1"))
    assert resources_of(found)["requests"] == {"nvidia.com/gpucores": "30", "nvidia.com/gpumem": "1500"}
    assert resources_of(found, 1)["requests"] == {"nvidia.com/gpucores": "10", "nvidia.com/gpumem": "500"}


def test_without_an_answer_the_request_stands() -> None:
    subject = pod(limits("main", 80, 4000), annotations={})
    plan = plan_pod(subject, "team", HAMI, "Initial")
    assert not isinstance(plan, Decision)
    for decision in (
        admit_planned(subject, plan, problem="the recommender cannot be reached"),
        admit_planned(subject, plan, Grant("r", 81, 100, "1")),
    ):
        found = apply_patch(subject, decision.patch)
        assert decision.outcome == "recommender-unavailable"
        assert resources_of(found) == resources_of(subject)
        assert variables(found)["main"]["CUDA_DEVICE_SM_LIMIT"] == "80"
        assert found["metadata"]["annotations"]["clustergym.io/status"].startswith("the pod runs with its request: the")


def kai_pod(**annotations: str) -> dict[str, Any]:
    requested = {key.replace("_", "-"): value for key, value in annotations.items()}
    return pod(container(gpu=None), container("side", gpu=None), annotations=requested)


def test_kai_fractions_shrink_to_the_larger_of_both_grants() -> None:
    subject = kai_pod(gpu_fraction="0.8")
    subject["metadata"]["annotations"]["clustergym.io/memory"] = "4000"
    found = admitted(subject, KAI, mode="Initial", grant=GRANT)
    # 60 of 80 % of the cores, a quarter of the memory: 0.75 × 0.8.
    assert found["metadata"]["annotations"]["gpu-fraction"] == "0.6"
    assert found["metadata"]["annotations"]["clustergym.io/requested-cores"] == "80"
    assert set(variables(found)) == {"main"}
    assert admit_pod(found, "team", KAI, "Initial", GRANT).patch == []
    found = admitted(subject, KAI, mode="Initial", grant=Grant("r", 17, 1000, "1"))
    assert found["metadata"]["annotations"]["gpu-fraction"] == "0.2"


def test_kai_memory_is_set_and_the_named_container_is_managed() -> None:
    subject = kai_pod(gpu_memory="4000", gpu_fraction_container_name="side")
    subject["metadata"]["annotations"]["clustergym.io/cores"] = "80"
    found = admitted(subject, KAI, mode="Initial", grant=GRANT)
    assert found["metadata"]["annotations"]["gpu-memory"] == "1000"
    assert variables(found) == {
        "side": {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "60", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1000M"}
    }


@pytest.mark.parametrize(
    ("bounds", "cores", "memory"),
    [
        ({"min-allowed-cores": "70"}, "70", "1000"),
        ({"max-allowed-cores": "50"}, "50", "1000"),
        ({"min-allowed-memory": "3k"}, "60", "3000"),
        ({"max-allowed-memory": "700"}, "60", "700"),
        ({"min-allowed-cores": "90", "min-allowed-memory": "9000"}, "80", "4000"),
    ],
)
def test_grants_stay_within_the_bounds(bounds: dict[str, str], cores: str, memory: str) -> None:
    subject = pod()
    subject["metadata"]["annotations"] |= {f"clustergym.io/{key}": value for key, value in bounds.items()}
    for mode in ("Off", "Initial", "Auto"):
        annotations = admitted(subject, HAMI, mode=mode, grant=GRANT)["metadata"]["annotations"]
        assert annotations["clustergym.io/recommended-cores"] == cores
        assert annotations["clustergym.io/recommended-memory"] == memory
    stored = admitted(subject, HAMI)
    plan = plan_binding(stored, "team")
    assert plan is not None
    at_binding = apply_patch(binding(), grant_decision(binding(), plan, GRANT).patch)["metadata"]["annotations"]
    assert at_binding["clustergym.io/granted-cores"] == cores
    assert at_binding["clustergym.io/granted-memory"] == memory


def test_bounds_that_exclude_each_other_are_refused() -> None:
    subject = pod()
    subject["metadata"]["annotations"] |= {
        "clustergym.io/min-allowed-cores": "50", "clustergym.io/max-allowed-cores": "40",
    }  # fmt: skip
    decision = admit_pod(subject, "team", MPS, "Auto", GRANT)
    assert decision.patch == []
    assert "min-allowed-cores is 50, more than clustergym.io/max-allowed-cores, which is 40" in decision.warnings[0]


@pytest.mark.parametrize("from_limits", [True, False])
def test_a_binding_may_only_tighten_the_grant(from_limits: bool) -> None:
    subject = pod(limits("main", 80, 4000), annotations={}) if from_limits else pod()
    stored = admitted(subject, HAMI, grant=GRANT)
    plan = plan_binding(stored, "team")
    assert plan is not None
    # The agent sees the original request, and what it may grant at most.
    assert (plan.request.cores, plan.request.memory_mb) == (80, 4000)
    assert (plan.bounds.max_cores, plan.bounds.max_memory_mb) == (60, 1000)
    for granted, expected in ((Grant("b", 70, 2000, "1"), ("60", "1000m")), (Grant("b", 40, 500, "1"), ("40", "500m"))):
        annotations = apply_patch(binding(), grant_decision(binding(), plan, granted).patch)["metadata"]["annotations"]
        assert annotations["cores.clustergym.io/main"] == expected[0]
        assert annotations["memory.clustergym.io/main"] == expected[1]


def test_forged_annotations_cannot_raise_a_grant() -> None:
    forged = {"clustergym.io/granted-cores": "100", "clustergym.io/granted-memory": "99k"}
    subject = pod()
    subject["metadata"]["annotations"] |= forged
    stored = admitted(subject, HAMI)
    assert variables(stored)["main"] == {"CUDA_DEVICE_SM_LIMIT": "80", "CUDA_DEVICE_MEMORY_LIMIT_0": "4000m"}
    plan = plan_binding(stored, "team")
    assert plan is not None
    assert (plan.bounds.max_cores, plan.bounds.max_memory_mb) == (80, 4000)


def test_feedback_credentials_are_passed_on() -> None:
    stored = admitted(pod(), MPS, grant=Grant("r", 60, 1000, "1", "secret-a"))
    assert stored["metadata"]["annotations"]["clustergym.io/recommendation-token"] == "secret-a"
    plan = plan_binding(stored, "team")
    assert plan is not None
    found = grant_decision(binding(), plan, Grant("b", 60, 1000, "1", "secret-b"))
    annotations = apply_patch(binding(), found.patch)["metadata"]["annotations"]
    assert annotations["clustergym.io/feedback-token"] == "secret-b"


def test_a_container_added_later_gets_a_part_of_the_first_grant() -> None:
    once = admitted(pod(), HAMI, mode="Initial", grant=GRANT)
    once["spec"]["containers"].append(container("side"))
    plan = plan_pod(once, "team", HAMI, "Initial")
    assert not isinstance(plan, Decision)
    assert not plan.is_new
    found = apply_patch(once, admit_planned(once, plan).patch)
    assert resources_of(found)["limits"]["nvidia.com/gpucores"] == "60"
    assert resources_of(found, 1)["limits"]["nvidia.com/gpucores"] == "30"
    assert variables(found)["side"]["CUDA_DEVICE_SM_LIMIT"] == "30"


# The binding webhook


def test_a_grant_overwrites_the_annotations_that_the_variables_read() -> None:
    stored = admitted(pod())
    plan = plan_binding(stored, "team")
    assert plan is not None
    request = plan.request
    assert (request.owner, request.cores, request.memory_mb, request.qos_class) == (
        "team/Pod/train", 80, 4000, "latency-sensitive",
    )  # fmt: skip
    decision = grant_decision(binding(), plan, Grant("id-1", 60, 3000, "7"))
    # The API server copies a binding's annotations over the pod's.
    stored["metadata"]["annotations"] |= apply_patch(binding(), decision.patch)["metadata"]["annotations"]
    assert variables(stored) == {
        "main": {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "60", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=3000M"}
    }
    annotations = stored["metadata"]["annotations"]
    assert annotations["clustergym.io/allocation-id"] == "id-1"
    assert annotations["clustergym.io/policy-version"] == "7"
    assert annotations["clustergym.io/granted-cores"] == "60"
    assert annotations["clustergym.io/granted-memory"] == "3000"
    assert annotations["clustergym.io/status"] == "granted"
    # A second binding of the pod does not ask the agent again.
    assert plan_binding(stored, "team") is None


def test_a_grant_is_divided_like_the_request() -> None:
    stored = admitted(pod(limits("a", 30, 1000), limits("b", 10, 3000), annotations={}))
    found = plan_binding(stored, "team")
    assert found is not None
    decision = grant_decision(binding(), found, Grant("id", 20, 2000, "1"))
    annotations = apply_patch(binding(), decision.patch)["metadata"]["annotations"]
    assert (annotations["cores.clustergym.io/a"], annotations["cores.clustergym.io/b"]) == ("15", "5")
    assert (annotations["memory.clustergym.io/a"], annotations["memory.clustergym.io/b"]) == ("0=500M", "0=1500M")


@pytest.mark.parametrize(("cores", "memory"), [(81, 100), (0, 100), (-5, 100), (50, 4001), (50, 0)])
def test_a_grant_outside_the_request_is_ignored(cores: float, memory: float) -> None:
    found = plan_binding(admitted(pod()), "team")
    assert found is not None
    decision = grant_decision(binding(), found, Grant("id", cores, memory, "1"))
    annotations = apply_patch(binding(), decision.patch)["metadata"]["annotations"]
    assert decision.outcome == "bad-grant"
    assert set(annotations) == {"clustergym.io/status"}
    assert annotations["clustergym.io/status"].startswith("not reduced at binding: the agent granted")


def test_pods_that_were_not_injected_are_not_managed() -> None:
    assert plan_binding(pod(), "team") is None
    assert plan_binding(admitted(pod(label=None)), "team") is None
    forged = pod(annotations={"clustergym.io/backend": "mps", "clustergym.io/cores": "5", "clustergym.io/memory": "5"})
    assert plan_binding(forged, "team") is None


def test_a_pod_keeps_the_backend_it_was_injected_with() -> None:
    found = plan_binding(admitted(pod(), HAMI), "team")
    assert found is not None
    assert found.backend is HAMI


# Patches and reviews


def test_patches_add_missing_parents() -> None:
    for subject in ({}, {"metadata": None}, {"metadata": {}}, {"metadata": {"annotations": None}}):
        patched = apply_patch(subject, add_annotations(subject, {"a/b~c": "1"}))
        assert patched["metadata"]["annotations"] == {"a/b~c": "1"}
    assert escape("a/b~c") == "a~1b~0c"
    assert apply_patch(binding(), request_decision(binding(), "x", "y").patch)["metadata"]["annotations"]


def test_a_patch_that_an_api_server_would_refuse_raises() -> None:
    with pytest.raises(ValueError, match="the object has no 'annotations' there"):
        apply_patch({"metadata": {}}, [{"op": "add", "path": "/metadata/annotations/x", "value": "1"}])
    with pytest.raises(ValueError, match="its parent is str"):
        apply_patch({"a": "text"}, [{"op": "add", "path": "/a/b", "value": 1}])
    with pytest.raises(ValueError, match="expected 'add'"):
        apply_patch({}, [{"op": "remove", "path": "/a"}])


NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
VARIABLES = st.sampled_from([*MPS.variables, *HAMI.variables, "MODEL"]).map(lambda name: {"name": name, "value": "1"})
CONTAINERS = st.fixed_dictionaries(
    {"name": NAMES, "image": st.just("cuda")},
    optional={
        "env": st.none() | st.lists(VARIABLES, max_size=3),
        "envFrom": st.just([{"configMapRef": {"name": "c"}}]),
        "resources": st.none()
        | st.fixed_dictionaries(
            {},
            optional={
                "limits": st.dictionaries(
                    st.sampled_from(["nvidia.com/gpu", "nvidia.com/gpucores", "nvidia.com/gpumem", "cpu"]),
                    st.sampled_from(["0", "1", "2", "40", "3k", "100m"]),
                )
            },
        ),
    },
)
PODS = st.builds(
    lambda containers, init, annotations, label: {
        "metadata": {"name": "p", "labels": {"clustergym.io/allocate": label}, "annotations": annotations},
        "spec": {"containers": containers, "initContainers": init},
    },
    st.lists(CONTAINERS, min_size=1, max_size=3, unique_by=lambda c: c["name"]),
    st.none() | st.lists(CONTAINERS, max_size=2, unique_by=lambda c: c["name"]),
    st.none()
    | st.dictionaries(
        st.sampled_from(["clustergym.io/cores", "clustergym.io/memory", "clustergym.io/containers", "x/y"]),
        st.sampled_from(["50", "4000", "a", "main", "x"]),
    ),
    st.sampled_from(["true", "false"]),
)


@settings(max_examples=300, deadline=None)
@given(
    PODS, st.sampled_from([MPS, HAMI, KAI]), st.sampled_from(["Off", "Initial", "Auto"]), st.booleans(),
    st.floats(0.01, 1), st.floats(0.01, 1),
)  # fmt: skip
def test_any_pod_gets_a_valid_patch_or_none(
    subject: dict[str, Any], backend: Any, mode: Any, answered: bool, cores: float, memory: float
) -> None:
    before = copy.deepcopy(subject)
    plan = plan_pod(subject, "team", backend, mode)
    if isinstance(plan, Decision):
        decision = plan
    else:
        answer = Grant("r", plan.request.cores * cores, plan.request.memory_mb * memory, "1")
        decision = admit_planned(subject, plan, answer if answered else None)
    assert subject == before
    after = apply_patch(subject, decision.patch)
    # Everything that the user set is unchanged.
    for old, new in zip(containers_of(before), containers_of(after), strict=True):
        old_env, new_env = old.spec.get("env") or [], new.spec.get("env") or []
        assert new_env[: len(old_env)] == old_env
        names = [variable["name"] for variable in new_env]
        added = names[len(old_env) :]
        assert len(set(added)) == len(added)
        assert not set(added) & {variable["name"] for variable in old_env}
        for kind in ("limits", "requests"):
            mine = (new.spec.get("resources") or {}).get(kind) or {}
            for resource, value in ((old.spec.get("resources") or {}).get(kind) or {}).items():
                # Only what a scheduler counts may shrink.
                counted = resource in ("nvidia.com/gpucores", "nvidia.com/gpumem") and mode != "Off"
                assert mine[resource] == value or (counted and 1 <= int(mine[resource]) <= max(1, quantity(value, "")))
    for key, value in (before["metadata"]["annotations"] or {}).items():
        assert after["metadata"]["annotations"][key] == value
    assert admit_pod(after, "team", backend, mode).patch == []
    found = plan_binding(after, "team")
    assert (found is not None) == (decision.outcome in ("injected", "granted") and mode == "Auto")
    if found is not None:
        request = found.request
        grant = Grant("id", request.cores * cores, request.memory_mb * memory, "1")
        granted = apply_patch(binding(), grant_decision(binding(), found, grant).patch)["metadata"]["annotations"]
        # Every injected variable reads an annotation that is set, before and after the grant.
        for share in request.shares:
            for variable in injected_variables(share.container, backend):
                key = variable["valueFrom"]["fieldRef"]["fieldPath"].split("'")[1]
                assert after["metadata"]["annotations"][key]
                assert granted[key]


def test_reviews_are_parsed_and_answered() -> None:
    body = {
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "u", "namespace": "team", "name": "p", "operation": "CREATE", "dryRun": True,
            "resource": {"group": "", "version": "v1", "resource": "pods"}, "subResource": "binding",
            "object": {"a": 1},
        },
    }  # fmt: skip
    review = parse(json.dumps(body).encode())
    assert (review.uid, review.resource, review.dry_run, review.object) == ("u", "pods/binding", True, {"a": 1})
    reply = make_response("u", admit_pod(pod(), "team", MPS))
    assert (reply["apiVersion"], reply["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response = reply["response"]
    assert (response["uid"], response["allowed"], response["patchType"]) == ("u", True, "JSONPatch")
    assert json.loads(base64.b64decode(response["patch"])) == admit_pod(pod(), "team", MPS).patch
    assert make_response("u", admit_pod(pod(label=None), "team", MPS))["response"] == {"uid": "u", "allowed": True}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"apiVersion": "admission.k8s.io/v1beta1"}, "expected 'admission.k8s.io/v1'"),
        ({"kind": "Pod"}, "kind AdmissionReview"),
        ({"request": None}, "no request"),
        ({"request": {"object": {}}}, "no uid"),
        ({"request": {"uid": 5, "object": {}}}, "no uid"),
        ({"request": {"uid": "u"}}, "no object"),
        ({"request": {"uid": "u", "object": None}}, "no object"),
    ],
)
def test_invalid_reviews_are_refused(change: dict[str, Any], reason: str) -> None:
    body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "u", "object": {}}}
    with pytest.raises(BadReview, match=reason):
        parse(json.dumps(body | change).encode())
    for junk in (b"", b"{", b"[]", b"\xff", b"[" * 100_000):
        with pytest.raises(BadReview):
            parse(junk)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3s", 3), ("1m0s", 60), ("500ms", 0.5), ("1h1m1.5s", 3661.5), ("", None), ("3", None), ("x", None)],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert duration_s(text) == seconds
