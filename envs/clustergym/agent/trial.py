"""Who decides about a class of pods: the VPA rule, until a test in shadow says that the policy is better."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from clustergym.agent.owners import STRICT, NotNegative

BETS = (0.02, 0.08, 0.3)
"""The capital is split between these bets. Each must be less than 1 / LARGEST."""
LARGEST = 2.0
"""Differences of rewards are clipped to ± this."""
ALPHA = 0.001
"""Largest probability that a trial replaces an arm that is at least as good."""
LENGTH = 2000
"""A trial without a verdict ends after so many pods, and a new one begins: the policy has changed meanwhile."""
LOST = 0.05
"""A trial ends, too, when so little capital is left: what was won long ago must not delay the way back."""


@dataclass
class Trial:
    """A sequential test of the arm that does not decide against the one that does.

    For each pod, the rewards of both arms are computed from what was measured of the pod. A gambler bets on "the other
    arm is better". If it is not better on average, the expected capital never grows, so it reaches 1 / alpha with a
    probability of at most alpha, however often one looks (Ville's inequality). Then the other arm decides, and the next
    trial tests the way back.
    """

    policy_decides: bool = False
    pods: Annotated[int, Field(ge=0)] = 0
    """Pods of the current trial."""
    mean: float = 0.0
    """Mean reward of the policy minus that of the rule in the current trial."""
    capital: Annotated[list[NotNegative], Field(min_length=len(BETS), max_length=len(BETS))] = field(
        default_factory=lambda: [1.0] * len(BETS)
    )

    __pydantic_config__ = STRICT

    def add(self, difference: float) -> bool:
        """Add the reward of the policy minus that of the rule for one pod. True if the other arm decides from now."""
        self.pods += 1
        self.mean += (difference - self.mean) / self.pods
        against = min(max(-difference if self.policy_decides else difference, -LARGEST), LARGEST)
        self.capital = [money * (1.0 + bet * against) for money, bet in zip(self.capital, BETS, strict=True)]
        capital = sum(self.capital) / len(BETS)
        changed = capital >= 1.0 / ALPHA
        self.policy_decides ^= changed
        if changed or capital < LOST or self.pods >= LENGTH:
            self.pods, self.mean, self.capital = 0, 0.0, [1.0] * len(BETS)
        return changed
