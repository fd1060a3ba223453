"""Patches and admission reviews: any pod gets a valid patch, and invalid reviews are refused."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym.kubernetes import Decision, plan_pod
from clustergym.kubernetes import admit_pod as admit_planned
from clustergym.kubernetes.decisions import injected_variables
from clustergym.kubernetes.patches import add_annotations, apply_patch, escape
from clustergym.kubernetes.requests import containers_of, quantity
from clustergym.kubernetes.review import BadReview, duration_s, make_response, parse
from webhook_pods import HAMI, KAI, MPS, admit_pod, answer, pod


def test_patches_add_missing_parents() -> None:
    for subject in ({}, {"metadata": None}, {"metadata": {}}, {"metadata": {"annotations": None}}):
        patched = apply_patch(subject, add_annotations(subject, {"a/b~c": "1"}))
        assert patched["metadata"]["annotations"] == {"a/b~c": "1"}
    assert escape("a/b~c") == "a~1b~0c"


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
    PODS, st.sampled_from([MPS, HAMI, KAI]), st.sampled_from(["Off", "Initial"]), st.booleans(),
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
        grant = answer(max(plan.request.cores * cores, 1), max(plan.request.memory_mb * memory, 1))
        decision = admit_planned(subject, plan, grant if answered else None)
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
    if decision.outcome in ("injected", "granted"):
        # Every injected variable reads an annotation that is set.
        assert not isinstance(plan, Decision)
        for one in plan.ready:
            for variable in injected_variables(one.name, backend):
                key = variable["valueFrom"]["fieldRef"]["fieldPath"].split("'")[1]
                assert after["metadata"]["annotations"][key]


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
    assert (review.uid, review.resource.resource, review.subResource) == ("u", "pods", "binding")
    assert (review.dryRun, review.object) == (True, {"a": 1})
    reply = make_response("u", admit_pod(pod(), "team", MPS))
    assert (reply["apiVersion"], reply["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response = reply["response"]
    assert (response["uid"], response["allowed"], response["patchType"]) == ("u", True, "JSONPatch")
    assert json.loads(base64.b64decode(response["patch"])) == admit_pod(pod(), "team", MPS).patch
    assert make_response("u", admit_pod(pod(label=None), "team", MPS))["response"] == {"uid": "u", "allowed": True}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"apiVersion": "admission.k8s.io/v1beta1"}, "apiVersion: Input should be 'admission.k8s.io/v1'"),
        ({"kind": "Pod"}, "kind: Input should be 'AdmissionReview'"),
        ({"request": None}, "request: Input should be"),
        ({"request": {"object": {}}}, "request.uid: Field required"),
        ({"request": {"uid": 5, "object": {}}}, "request.uid: Input should be a valid string"),
        ({"request": {"uid": "", "object": {}}}, "request.uid: String should have at least 1 character"),
        ({"request": {"uid": "u"}}, "request.object: Field required"),
        ({"request": {"uid": "u", "object": None}}, "request.object: Input should be"),
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
