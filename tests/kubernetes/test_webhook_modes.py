"""Modes, recommendations and bounds of the webhooks: what a grant may change before scheduling and at binding."""

from __future__ import annotations

from typing import Any

import pytest

from clustergym.kubernetes import Decision, Grant, grant_decision, plan_binding, plan_pod
from clustergym.kubernetes import admit_pod as admit_planned
from clustergym.kubernetes.patches import apply_patch
from webhook_pods import HAMI, KAI, MPS, admit_pod, admitted, binding, container, limits, pod, variables

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
