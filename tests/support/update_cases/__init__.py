"""Every trainer in the form that ``test_trainer_updates.py`` needs: a made-up batch, a roll-out and their references.

A case knows what its trainer's functions are called and how its network is built from layers. The formulas are in
``update_reference.py``.
"""

from update_cases.allocation import GpuAllocCase, LSTMCase, OnlineCase
from update_cases.atari import AtariCase
from update_cases.base import MASKED, NEXT_STEP, Case, Problem, scripted_environments
from update_cases.continuous import ContinuousCase
from update_cases.federated import FederatedBoxCase, FederatedCase
from update_cases.language_model import LLMCase
from update_cases.sequences import RecurrentCase

__all__ = ["CASES", "MASKED", "NEXT_STEP", "AtariCase", "Case", "LLMCase", "Problem", "scripted_environments"]

CASES: list[Case] = [
    Case(), ContinuousCase(), RecurrentCase(), AtariCase(), GpuAllocCase(), LSTMCase(), OnlineCase(), FederatedCase(),
    FederatedBoxCase(), LLMCase(),
]  # fmt: skip
