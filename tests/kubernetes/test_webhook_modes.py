"""Modes, recommendations and bounds of the webhook: what a grant may change before scheduling."""

from __future__ import annotations

from typing import Any

import pytest

from clustergym.kubernetes import Decision, plan_pod
from clustergym.kubernetes import admit_pod as admit_planned
from clustergym.kubernetes.patches import apply_patch
from webhook_pods import HAMI, KAI, MPS, admit_pod, admitted, answer, container, limits, pod, variables

GRANT = answer(60, 1000)


def affinity(field: dict[str, Any]) -> dict[str, Any]:
    """As the controller of a DaemonSet sets it."""
    required = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


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
        "clustergym.io/mode": "Off", "clustergym.io/allocation-id": GRANT.allocation_id,
        "clustergym.io/agent": "recommender", "clustergym.io/decided-by": "rule: VPA rule",
        "clustergym.io/policy-version": "7",
        "clustergym.io/requested-cores": "80", "clustergym.io/requested-memory": "4000",
        "clustergym.io/recommended-cores": "60", "clustergym.io/recommended-memory": "1000",
        "clustergym.io/status": "mode Off: the pod runs with its request",
    }  # fmt: skip
    assert admit_pod(found, "team", HAMI, "Off", GRANT).patch == []


@pytest.mark.parametrize(
    ("namespace_mode", "annotation", "mode"),
    [("Off", None, "Off"), ("Off", "Initial", "Initial"), ("Initial", "Off", "Off"), ("Initial", None, "Initial")],
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


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("initial", "expected Off, Initial"), ("Auto", "Auto went with the binding webhook: use Initial")],
)
def test_an_unknown_mode_changes_nothing(mode: str, reason: str) -> None:
    subject = pod()
    subject["metadata"]["annotations"]["clustergym.io/mode"] = mode
    decision = admit_pod(subject, "team", MPS, "Initial", GRANT)
    assert decision.patch == []
    assert f"clustergym.io/mode is {mode!r}: expected Off, Initial" in decision.warnings[0]
    assert reason in decision.warnings[0]


def test_an_agent_in_shadow_mode_recommends_and_grants_the_request() -> None:
    grant = answer(80, 4000, recommended_cores=60, recommended_memory=1000, decided_by="shadow")
    annotations = admitted(pod(), HAMI, mode="Initial", grant=grant)["metadata"]["annotations"]
    assert annotations["clustergym.io/granted-cores"] == "80"
    assert annotations["clustergym.io/recommended-cores"] == "60"


@pytest.mark.parametrize(
    ("spec", "node"),
    [
        ({}, None),
        ({"nodeName": "n-1"}, "n-1"),
        ({"nodeSelector": {"kubernetes.io/hostname": "n-1"}}, "n-1"),
        ({"nodeSelector": {"zone": "a"}}, None),
        ({"affinity": affinity({"key": "metadata.name", "operator": "In", "values": ["n-1"]})}, "n-1"),
        ({"affinity": affinity({"key": "metadata.name", "operator": "In", "values": ["n-1", "n-2"]})}, None),
        ({"affinity": affinity({"key": "metadata.name", "operator": "NotIn", "values": ["n-1"]})}, None),
        ({"affinity": {"nodeAffinity": None}}, None),
    ],
)
def test_the_agent_of_the_node_is_asked_if_the_pod_names_it(spec: dict[str, Any], node: str | None) -> None:
    subject = pod()
    subject["spec"] |= spec
    plan = plan_pod(subject, "team", HAMI, "Initial")
    assert not isinstance(plan, Decision)
    assert plan.node == node
    annotations = admitted(subject, HAMI, grant=GRANT)["metadata"]["annotations"]
    assert annotations["clustergym.io/agent"] == ("recommender" if node is None else "node")


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
    found = admitted(subject, HAMI, mode="Initial", grant=answer(40, 2000))
    assert resources_of(found)["requests"] == {"nvidia.com/gpucores": "30", "nvidia.com/gpumem": "1500"}
    assert resources_of(found, 1)["requests"] == {"nvidia.com/gpucores": "10", "nvidia.com/gpumem": "500"}


def test_without_an_answer_the_request_stands() -> None:
    subject = pod(limits("main", 80, 4000), annotations={})
    plan = plan_pod(subject, "team", HAMI, "Initial")
    assert not isinstance(plan, Decision)
    for decision in (
        admit_planned(subject, plan, problem="the recommender cannot be reached"),
        admit_planned(subject, plan, answer(81, 100)),
    ):
        found = apply_patch(subject, decision.patch)
        assert decision.outcome == "agent-unavailable"
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
    found = admitted(subject, KAI, mode="Initial", grant=answer(17, 1000))
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
    for mode in ("Off", "Initial"):
        annotations = admitted(subject, HAMI, mode=mode, grant=GRANT)["metadata"]["annotations"]
        assert annotations["clustergym.io/recommended-cores"] == cores
        assert annotations["clustergym.io/recommended-memory"] == memory
    assert annotations["clustergym.io/granted-cores"] == cores
    assert annotations["clustergym.io/granted-memory"] == memory


def test_bounds_that_exclude_each_other_are_refused() -> None:
    subject = pod()
    subject["metadata"]["annotations"] |= {
        "clustergym.io/min-allowed-cores": "50", "clustergym.io/max-allowed-cores": "40",
    }  # fmt: skip
    decision = admit_pod(subject, "team", MPS, "Initial", GRANT)
    assert decision.patch == []
    assert "min-allowed-cores is 50, more than clustergym.io/max-allowed-cores, which is 40" in decision.warnings[0]


def test_forged_annotations_cannot_raise_a_grant() -> None:
    forged = {"clustergym.io/granted-cores": "100", "clustergym.io/granted-memory": "99k"}
    subject = pod()
    subject["metadata"]["annotations"] |= forged
    stored = admitted(subject, HAMI)
    assert variables(stored)["main"] == {"CUDA_DEVICE_SM_LIMIT": "80", "CUDA_DEVICE_MEMORY_LIMIT_0": "4000m"}


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
