"""Mutation run over the roll-outs and updates of every trainer, with the operators of mutmut.

    python tests/details/mutants.py --every 7                             # 460 mutants: about 15 minutes on one core
    python tests/details/mutants.py                                       # all 3,200 mutants: about two hours
    python tests/details/mutants.py --trainers ppo ppo_lstm --functions update
    python tests/details/mutants.py --every 7 --results runs/mutants.json   # continue where a run was interrupted
    python tests/details/mutants.py --show                                # show the mutants and run nothing

mutmut creates the mutants; this script runs them, because mutmut's own runner needs importable packages and a test run
per process. Tests are collected once. For each mutant, a forked child swaps the code of one function and runs the tests
of its trainer until one fails. ``survivors.yaml`` lists the mutants that no test can detect, each with a reason. The
exit code is 1 if another mutant survives, or if a mutant of the list does not exist or is detected.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache
from inspect import unwrap
from pathlib import Path
from textwrap import indent
from types import CodeType
from typing import Any

import libcst as cst
import pytest
import tyro
import yaml
from libcst.metadata import MetadataWrapper
from mutmut.mutation.file_mutation import Mutation, MutationVisitor
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode
from rich.console import Console

from clustergym.common.files import write_atomically

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
VECTOR = ROOT / "envs" / "clustergym" / "training" / "vector.py"
SURVIVORS = Path(__file__).with_name("survivors.yaml")

# Functions that the mutants are in. A name that a trainer does not have is ignored. A function that is a copy of one in
# an earlier trainer is left out: tests/test_trainers_agree.py compares the copies.
TRAINERS = (
    "ppo", "ppo_continuous_action", "ppo_recurrent", "ppo_atari", "ppo_gpu_alloc", "ppo_lstm", "ppo_gpu_alloc_online",
    "ppo_federated", "ppo_llm", "ppo_moe_marl", "vector",
)  # fmt: skip
"""Files in cleanrl_ppo, and training/vector.py, which steps the environments."""
FUNCTIONS = (
    "anneal", "compute_gae", "normalize_advantages", "policy_loss", "value_loss", "kl_estimators", "mask_logits",
    "categorical_entropy", "explained_variance", "make_optimizer", "Batch.take", "update",
    "Agent.draw_noise", "Agent.act", "Agent.evaluate_actions", "Agent.get_logits", "Agent.get_value", "Agent.forward",
    "NormalizedEnvs.observe", "NormalizedEnvs.normalize", "NormalizedEnvs.step",
    "VectorEnvs._observe", "VectorEnvs._tensor", "VectorEnvs.step", "VectorEnvs._final_obs", "VectorEnvs._add_recorded",
    "Rollouts.collect", "Rollouts._final_values", "Rollouts.normalize", "Rollouts._value", "episode_charts",
    "gaussian_logprob", "gaussian_entropy", "clip_action", "RunningMeanStd.update", "normalize_obs",
    "RewardScaler.__call__", "Agent.remember", "Agent.heads", "Agent.std",
    "categorical_kl", "normal_kl", "log_prob", "policy_entropy", "adapted_beta", "Transitions.take",
    "Learner.collect", "Learner.loss", "Learner.learn", "Learner.iterate", "Learner.neighbour_dist",
    "PolicyWithValue.forward", "response_logprobs", "model_logprobs", "response_mask", "token_rewards", "next_kl_coef",
    "rollout", "masked_entropy", "sample", "subtract_group_baseline", "Batch.rows", "Batch.inputs", "Rollouts.step",
    "Rollouts.inputs", "Rollouts.legal", "Rollouts.look", "ReturnStatistics.update", "level_logprobs",
)  # fmt: skip


@dataclass
class Args:
    trainers: list[str] = field(default_factory=lambda: list(TRAINERS))
    """Trainers to mutate."""
    functions: list[str] = field(default_factory=lambda: list(FUNCTIONS))
    """Functions to mutate."""
    every: int = 1
    """Run only each n-th mutant. The list of survivors is then not checked for mutants that do not exist."""
    show: bool = False
    """Show the mutants and run nothing."""
    results: Path | None = None
    """File that holds the mutants that were detected. They are not run again as long as their source is the same."""
    timeout_s: int = 60
    """A mutant counts as detected if its tests take this many seconds of CPU time."""


@dataclass(frozen=True)
class Mutant:
    trainer: str
    function: str
    change: str
    """Changed lines, before → after."""
    source: str
    """The function with the change."""

    def __str__(self) -> str:
        return f"{self.trainer}.{self.function}: {self.change}"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()[:16]


# Mutants


def remove_statement(node: cst.SimpleStatementLine) -> Iterable[cst.SimpleStatementLine]:
    """Remove a statement that is only a call, such as ``optimizer.step()``. mutmut has no such operator."""
    if len(node.body) == 1 and isinstance(node.body[0], cst.Expr) and isinstance(node.body[0].value, cst.Call):
        yield node.with_changes(body=[cst.Pass()])


OPERATORS = [*mutation_operators, (cst.SimpleStatementLine, remove_statement)]


def function_sources(tree: ast.Module, source: str) -> dict[str, str]:
    """Source of each function and method, by its qualified name."""
    out = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            out[node.name] = ast.get_source_segment(source, node) or ""
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    out[f"{node.name}.{method.name}"] = ast.get_source_segment(source, method) or ""
    return out


def changed_lines(before: str, after: str) -> str:
    """The lines that differ, joined: before → after."""
    old, new = before.splitlines(), after.splitlines()
    differing = [code for code in SequenceMatcher(None, old, new, False).get_opcodes() if code[0] != "equal"]
    left = " ".join(line.strip() for _, a, b, _, _ in differing for line in old[a:b])
    right = " ".join(line.strip() for _, _, _, a, b in differing for line in new[a:b])
    return f"{left} → {right or 'nothing'}"


def mutants_of(path: Path, functions: set[str]) -> Iterator[Mutant]:
    """All mutants of some functions of a file, in the order of the file."""
    # mutmut leaves out functions with a decorator. Only the code inside is swapped, so decorators do not matter here.
    source = re.sub(r"^ *@torch\.no_grad\(\)\n", "", path.read_text(), flags=re.MULTILINE)
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = MutationVisitor(OPERATORS, IgnoredCode(set(), set(), set()))
    module = wrapper.visit(visitor)
    inside: dict[Any, str] = {}
    for node in module.body:
        if isinstance(node, cst.FunctionDef):
            inside[node] = node.name.value
        elif isinstance(node, cst.ClassDef):
            for method in node.body.body:
                if isinstance(method, cst.FunctionDef):
                    inside[method] = f"{node.name.value}.{method.name.value}"
    seen: set[str] = set()
    for mutation in visitor.mutations:
        function = mutation.contained_by_top_level_function
        name = inside.get(function, "")
        if name not in functions or other_spelling(mutation):
            continue
        before = module.code_for_node(function)
        after = module.code_for_node(function.deep_replace(mutation.original_node, mutation.mutated_node))
        mutant = Mutant(path.stem, name, changed_lines(before, after), standalone(name, after))
        if str(mutant) not in seen and is_valid(mutant.source) and without_check(before) != without_check(after):
            seen.add(str(mutant))
            yield mutant


def other_spelling(mutation: Mutation) -> bool:
    """mutmut changes a string in three ways. One is enough for the name of a metric."""
    node = mutation.mutated_node
    return isinstance(node, cst.SimpleString) and "XX" not in node.value and bool(node.value.strip("\"'"))


def without_check(function: str) -> str:
    """Source without the ``strict`` of zip. The lengths are always equal, so a mutant of it could not be detected."""
    return re.sub(r",\s*(strict=\w+)?\)", ")", function)


def standalone(name: str, function: str) -> str:
    """A file that holds only this function, in its class."""
    if "." in name:
        function = f"class {name.split('.')[0]}:\n" + indent(function, "    ")
    return f"from __future__ import annotations\n{function}"


def is_valid(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


@cache
def all_mutants(trainers: tuple[str, ...], functions: tuple[str, ...]) -> list[Mutant]:
    """Mutants of all trainers, without those of copied functions."""
    known: set[tuple[str, str]] = set()
    out = []
    for trainer in TRAINERS:
        path = VECTOR if trainer == "vector" else ROOT / "cleanrl_ppo" / f"{trainer}.py"
        if not path.exists():
            continue
        source = path.read_text()
        sources = function_sources(ast.parse(source), source)
        new = {name for name in FUNCTIONS if name in sources and (name, sources[name]) not in known}
        known |= {(name, sources[name]) for name in new}
        if trainer in trainers:
            out += list(mutants_of(path, new & set(functions)))
    return out


# Running them


def code_of(code: CodeType, name: str) -> CodeType:
    """The code of a function, by its qualified name, in the code of its file."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_qualname == name:
                return constant
            if name.startswith(f"{constant.co_qualname}."):
                return code_of(constant, name)
    raise LookupError(name)


def apply(mutant: Mutant) -> None:
    """Swap the code of the function in the imported trainer."""
    is_trainer = mutant.trainer != "vector"
    place: Any = sys.modules[f"cleanrl_ppo_{mutant.trainer}" if is_trainer else "clustergym.training.vector"]
    for part in mutant.function.split("."):
        place = getattr(place, part)
    unwrap(place).__code__ = code_of(compile(mutant.source, f"{mutant.trainer}.py", "exec"), mutant.function)


def passes(items: list[pytest.Item]) -> bool:
    """Run tests until one fails."""
    from _pytest.runner import runtestprotocol

    for item, following in zip(items, [*items[1:], None], strict=True):
        reports = runtestprotocol(item, log=False, nextitem=following)
        if any(report.failed for report in reports):
            return False
    return True


def in_a_child(mutant: Mutant | None, items: list[pytest.Item], timeout_s: int) -> bool:
    """Whether the tests pass with this mutant."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            # Of CPU time: on a busy machine, other programs must not make a mutant look detected.
            resource.setrlimit(resource.RLIMIT_CPU, (timeout_s, timeout_s + 1))
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            if mutant is not None:
                apply(mutant)
            code = 0 if passes(items) else 1
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 2:
        raise RuntimeError(f"{mutant}: the mutant could not be applied")
    return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0


def tests_of(mutant: Mutant, items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests of the trainer. Those of the mutated part come first."""
    parts = ("update", "stops") if mutant.function in ("update", "Learner.learn", "Learner.loss") else ("rollout",)
    own = [item for item in tests_of_trainer(mutant.trainer, items) if item.path.stem != DEVICES]
    own.sort(key=lambda item: not any(part in item.name for part in parts))
    if any(word in mutant.change for word in ("device", ".cpu()", ".to(")):
        own += [item for item in tests_of_trainer(mutant.trainer, items) if item.path.stem == DEVICES]
    return own


def tests_of_trainer(trainer: str, items: list[pytest.Item]) -> list[pytest.Item]:
    further = [item for item in items if f"{item.path.stem}.py::{item.originalname}" in FURTHER.get(trainer, ())]
    if trainer == "vector":
        names = {"ppo", "ppo_atari"}
        parts = ("rollout", "device")
        own = [item for item in items if trainers_of(item) & names and any(part in item.name for part in parts)]
        return further + own
    return further + [item for item in items if trainer in trainers_of(item) and item not in further]


def trainers_of(item: pytest.Item) -> set[str]:
    """Trainers that a test is about: that of its case, or those of its file."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    case = parameters.get("case") or parameters.get("trainer")
    if case is not None:
        return {case.name}
    return FILES.get(item.path.stem, set())


# Further tests that are quick and know the answer. Tests with a case belong to its trainer.
DEVICES = "test_devices"
"""Only for mutants that change where a tensor is."""
FILES = {"test_trainer_updates": {"ppo_llm"}, DEVICES: {"ppo_gpu_alloc_online"}}
FURTHER = {
    "ppo": ("test_ppo.py::test_log_probabilities_and_entropies_of_components_are_added",
            "test_ppo.py::test_every_component_is_sampled_from_its_own_distribution"),
    "ppo_federated": ("test_ppo_federated.py::test_normal_kl_log_prob_and_entropy_equal_torch_distributions",),
    "ppo_gpu_alloc": ("test_ppo_gpu_alloc.py::test_categorical_policy_matches_torch_distributions",
                      "test_ppo_gpu_alloc.py::"
                      "test_categorical_rollouts_follow_the_policy_and_penalise_missed_objectives",
                      "test_ppo_gpu_alloc.py::test_copies_decide_on_the_same_pod_and_share_a_baseline",
                      "test_ppo_gpu_alloc.py::test_copies_draw_from_different_parts_of_the_distribution"),
    "ppo_llm": ("test_ppo_llm.py::test_kl_controller_by_hand",
                "test_ppo_llm.py::test_kl_coefficient_stays_positive_and_changes_by_at_most_a_fifth"),
    "vector": ("test_vector_envs.py::test_observations_masks_and_last_observations_for_every_autoreset_mode",
               "test_vector_envs.py::test_actions_have_the_shape_of_the_action_space",
               "test_vector_envs.py::test_play_episodes_counts_one_episode_per_environment"),
}  # fmt: skip
"""Tests in other files, by trainer."""


class MutationRun:
    """Pytest plugin that runs the tests once per mutant instead of once."""

    def __init__(self, mutants: list[Mutant], timeout_s: int, results: Path | None = None) -> None:
        self.mutants, self.timeout_s, self.results = mutants, timeout_s, results
        self.detected: dict[str, str] = json.loads(results.read_text()) if results and results.exists() else {}
        """Hash of the source of each mutant that is known to be detected."""
        self.survivors: list[Mutant] = []
        self.seconds: dict[str, float] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        console = Console(stderr=True)
        left = [mutant for mutant in self.mutants if self.detected.get(str(mutant)) != mutant.digest]
        for trainer in sorted({mutant.trainer for mutant in left}):
            needed = {item for each in left if each.trainer == trainer for item in tests_of(each, session.items)}
            own = [item for item in session.items if item in needed]
            # Once here, so that the children inherit what torch loads at first use.
            warm = passes([item for item in own if "defaults" in item.name])
            if not warm or not in_a_child(None, own, 20 * self.timeout_s):
                raise pytest.UsageError(f"tests of {trainer} fail without a mutant")
        for number, mutant in enumerate(left, 1):
            began = time.perf_counter()
            if in_a_child(mutant, tests_of(mutant, session.items), self.timeout_s):
                self.survivors.append(mutant)
                line = f"{number}/{len(left)} survives: {mutant}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                self.detected[str(mutant)] = mutant.digest
            if number % 25 == 0 or number == len(left):
                console.print(f"{number}/{len(left)}", markup=False, highlight=False)
            if self.results is not None:
                write_atomically(self.results, json.dumps(self.detected, indent=0))
            taken = time.perf_counter() - began
            self.seconds[mutant.trainer] = self.seconds.get(mutant.trainer, 0.0) + taken
        return True


def run(mutants: list[Mutant], timeout_s: int = 60, results: Path | None = None) -> MutationRun:
    """Run the tests on each mutant."""
    plugin = MutationRun(mutants, timeout_s, results)
    files = [str(TESTS / f"{name}.py") for name in FILES]
    files += [str(TESTS / test) for tests in FURTHER.values() for test in tests]
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-summary", *files], plugins=[plugin])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"pytest ended with {code!r}")
    return plugin


def explained() -> dict[str, str]:
    """Reasons of the survivors in survivors.yaml, by mutant."""
    groups = yaml.safe_load(SURVIVORS.read_text()) if SURVIVORS.exists() else []
    return {mutant: group["reason"] for group in groups or [] for mutant in group["mutants"]}


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    found = all_mutants(tuple(args.trainers), tuple(args.functions))
    mutants = found[:: args.every]
    if args.show:
        for mutant in mutants:
            print(mutant)
        print(f"{len(mutants)} mutants")
        return
    reasons = explained()
    result = run(mutants, args.timeout_s, args.results)
    survivors = {str(mutant) for mutant in result.survivors}
    whole = args.every == 1 and set(args.trainers) >= set(TRAINERS) and set(args.functions) >= set(FUNCTIONS)
    names = {str(mutant) for mutant in mutants}
    unexplained = sorted(survivors - reasons.keys())
    detected = sorted((reasons.keys() & names) - survivors)
    unknown = sorted(reasons.keys() - names) if whole else []
    for title, each in (("survives without a reason", unexplained), ("is detected: remove it", detected),
                        ("does not exist: remove it", unknown)):  # fmt: skip
        for name in each:
            print(f"{title}: {name}")
    counts = {trainer: sum(mutant.trainer == trainer for mutant in mutants) for trainer in result.seconds}
    print(", ".join(f"{trainer} {count} in {result.seconds[trainer]:.0f} s" for trainer, count in counts.items()))
    print(
        f"{len(mutants)} mutants, {len(mutants) - len(survivors)} detected, {len(survivors)} survive, "
        f"{len(unexplained)} of them without a reason"
    )
    sys.exit(1 if unexplained or detected or unknown else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    main()
