"""Injected infrastructure faults: a pure function of seed, task, rollout and step.

Order, batching and worker count change nothing; the same key meets the same fault in every run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.tools.protocol import CallKey
from opensearch_lightning.types import INFRASTRUCTURE_ERRORS, POLICY_ERRORS, ErrorKind


@dataclass(frozen=True, kw_only=True)
class Outage:
    """A backend that goes down for several steps on end.

    At each step at which it is up, it goes down with probability ``rate``, for a number of steps drawn evenly from
    ``min_steps`` to ``max_steps``; it then is up for at least one step. Every call to it meanwhile fails as ``kind``,
    which may be given by its name.
    """

    rate: float
    min_steps: int = 1
    max_steps: int = 3
    kind: ErrorKind = ErrorKind.UNREACHABLE

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigurationError: a value out of range, or a kind that is no error of the infrastructure.
        """
        if not 0 <= self.rate <= 1:
            raise ConfigurationError(f"The rate of an outage is {self.rate}: set a probability in [0, 1].")
        if not 1 <= self.min_steps <= self.max_steps:
            raise ConfigurationError(
                f"An outage lasts {self.min_steps} to {self.max_steps} steps: set 1 <= min_steps <= max_steps."
            )
        object.__setattr__(self, "kind", _infrastructure(self.kind))


def _infrastructure(kind: str) -> ErrorKind:
    if kind not in INFRASTRUCTURE_ERRORS:
        why = "it is the policy's own error" if kind in POLICY_ERRORS else "there is no such kind of error"
        choices = ", ".join(sorted(INFRASTRUCTURE_ERRORS))
        raise ConfigurationError(f"{str(kind)!r} cannot be injected, {why}: choose from {choices}.")
    return ErrorKind(kind)


class FaultInjector:
    """Decides whether a call fails before it reaches its tool.

    Args:
        seed: other seeds give other faults.
        rates: probability of each kind of error, per call; together at most 1.
        outages: per backend, besides. Tools of one backend fail together.
        timeout_s: seconds of real time that an injected timeout takes; by default none.

    Raises:
        ConfigurationError: a rate out of range, or an error that is not of the infrastructure.
    """

    def __init__(
        self,
        seed: int,
        rates: Mapping[ErrorKind, float] | None = None,
        outages: Mapping[str, Outage] | None = None,
        *,
        timeout_s: float = 0.0,
    ) -> None:
        self._seed = seed
        # In a fixed order, so that the order of the mapping changes nothing.
        self._rates = sorted((_infrastructure(kind), float(rate)) for kind, rate in (rates or {}).items())
        self._outages = dict(outages or {})
        self.timeout_s = timeout_s
        for kind, rate in self._rates:
            if not rate >= 0:
                raise ConfigurationError(f"The rate of {kind} is {rate}: set a probability in [0, 1].")
        total = sum(rate for _, rate in self._rates)
        if total > 1 + 1e-9:
            raise ConfigurationError(f"The rates of injected faults add up to {total}: keep them at 1 or below.")
        if timeout_s < 0:
            raise ConfigurationError(f"timeout_s is {timeout_s}: set 0 or more seconds.")

    @property
    def outages(self) -> Mapping[str, Outage]:
        """Outages by backend."""
        return self._outages

    def fault(self, key: CallKey, backend: str) -> ErrorKind | None:
        """The fault that a call of ``key`` to ``backend`` meets, or ``None``."""
        outage = self._outages.get(backend)
        if outage is not None and self._is_down(key, backend, outage):
            return outage.kind
        drawn = self._uniform(key, key.step, "call")
        for kind, rate in self._rates:
            if drawn < rate:
                return kind
            drawn -= rate
        return None

    def _is_down(self, key: CallKey, backend: str, outage: Outage) -> bool:
        """Walk the rollout's steps from its first: up, perhaps down for some steps, up again."""
        step = 0
        while step <= key.step:
            if self._uniform(key, step, "onset", backend) < outage.rate:
                span = outage.max_steps - outage.min_steps + 1
                back_up = step + outage.min_steps + int(self._uniform(key, step, "length", backend) * span)
                if key.step < back_up:
                    return True
                step = back_up
            step += 1
        return False

    def _uniform(self, key: CallKey, step: int, *purpose: str) -> float:
        """A number in [0, 1) that depends on nothing but its arguments and the seed."""
        text = json.dumps([self._seed, key.task_id, key.rollout, step, *purpose])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / 2**53
