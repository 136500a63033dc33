import random
from collections import Counter
from itertools import groupby

import pytest

from opensearch_lightning.errors import ConfigurationError
from opensearch_lightning.tools import CallKey, FaultInjector, Outage
from opensearch_lightning.types import ErrorKind

CHOICES = "backend_error, rate_limited, timeout, unreachable"
RATES = {ErrorKind.TIMEOUT: 0.2, ErrorKind.RATE_LIMITED: 0.1, ErrorKind.BACKEND_ERROR: 0.05}


def key(task="t", rollout=0, step=0):
    return CallKey(task_id=task, rollout=rollout, step=step)


PINNED = [None, "timeout", None, "unreachable", "unreachable", None, None, None, None, "timeout", None, None]
KEYS = [key(f"task{t}", rollout, step) for t in range(50) for rollout in range(8) for step in range(10)]


def test_pure_and_independent_of_order():
    def faults(keys):
        injector = FaultInjector(7, RATES, {"ocr": Outage(rate=0.1)})
        return {k: injector.fault(k, "ocr") for k in keys}

    shuffled = random.Random(0).sample(KEYS, len(KEYS))
    assert faults(KEYS) == faults(shuffled)
    backwards = FaultInjector(7, dict(reversed(RATES.items())), {"ocr": Outage(rate=0.1)})
    assert [backwards.fault(k, "ocr") for k in KEYS] == list(faults(KEYS).values())


def test_every_part_of_the_key_matters():
    def sequence(seed, change):
        injector = FaultInjector(seed, {ErrorKind.TIMEOUT: 0.5})
        return [injector.fault(change(i), "x") for i in range(64)]

    base = sequence(0, lambda i: key(step=i))
    assert sequence(0, lambda i: key(step=i)) == base
    assert sequence(1, lambda i: key(step=i)) != base
    assert sequence(0, lambda i: key(task="u", step=i)) != base
    assert sequence(0, lambda i: key(rollout=1, step=i)) != base
    assert len(set(map(str, sequence(0, lambda i: key(rollout=i))))) == 2


def test_known_values_do_not_change():
    # Pinned: another hash or order would change every seeded run.
    injector = FaultInjector(3407, {ErrorKind.TIMEOUT: 0.3}, {"b": Outage(rate=0.2, min_steps=2, max_steps=3)})
    assert [injector.fault(key("task", 1, step), "b") for step in range(12)] == PINNED


def test_rates_are_met():
    counts = Counter(FaultInjector(0, RATES).fault(k, "any") for k in KEYS)
    for kind, rate in RATES.items():
        assert counts[kind] / len(KEYS) == pytest.approx(rate, abs=3 * (rate * (1 - rate) / len(KEYS)) ** 0.5)
    assert set(counts) == {None, *RATES}


def test_no_rates_no_faults_and_certain_faults():
    assert {FaultInjector(0).fault(k, "x") for k in KEYS} == {None}
    assert {FaultInjector(0, {ErrorKind.TIMEOUT: 1.0}).fault(k, "x") for k in KEYS} == {ErrorKind.TIMEOUT}


def outage_runs(outage, steps=40):
    """Lengths of outages, those cut by the end left out."""
    injector = FaultInjector(1, outages={"b": outage})
    lengths = Counter()
    for rollout in range(120):
        down = [injector.fault(key(rollout=rollout, step=s), "b") is not None for s in range(steps)]
        runs = [(state, len(list(group))) for state, group in groupby(down)]
        lengths.update(length for state, length in runs[:-1] if state)
    return lengths


def test_outages_last_as_long_as_said():
    lengths = outage_runs(Outage(rate=0.1, min_steps=2, max_steps=4))
    assert set(lengths) == {2, 3, 4}
    total = sum(lengths.values())
    assert all(count / total == pytest.approx(1 / 3, abs=0.08) for count in lengths.values())
    assert set(outage_runs(Outage(rate=0.3, min_steps=3, max_steps=3))) == {3}


def test_outages_begin_at_their_rate():
    injector = FaultInjector(2, outages={"b": Outage(rate=0.15, min_steps=2, max_steps=2)})
    begun = sum(injector.fault(key(rollout=r, step=0), "b") is not None for r in range(4000))
    assert begun / 4000 == pytest.approx(0.15, abs=0.02)


def test_an_outage_takes_a_backend_down_and_no_other():
    injector = FaultInjector(0, outages={"a": Outage(rate=0.3), "b": Outage(rate=0.3, kind=ErrorKind.BACKEND_ERROR)})
    a, b = ([injector.fault(k, backend) for k in KEYS] for backend in "ab")
    assert set(a) == {None, ErrorKind.UNREACHABLE}
    assert set(b) == {None, ErrorKind.BACKEND_ERROR}
    both = sum(x is not None and y is not None for x, y in zip(a, b, strict=True)) / len(KEYS)
    alone = sum(x is not None for x in a) / len(KEYS) * sum(y is not None for y in b) / len(KEYS)
    assert both == pytest.approx(alone, abs=0.03)
    assert {injector.fault(k, "c") for k in KEYS} == {None}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FaultInjector(0, {ErrorKind.MALFORMED_CALL: 0.1}), "policy's own"),
        (lambda: FaultInjector(0, {ErrorKind.TIMEOUT: -0.1}), r"rate of timeout is -0\.1"),
        (lambda: FaultInjector(0, {ErrorKind.TIMEOUT: float("nan")}), "rate of timeout is nan"),
        (lambda: FaultInjector(0, {ErrorKind.TIMEOUT: 0.7, ErrorKind.UNREACHABLE: 0.7}), r"add up to 1\.4"),
        (lambda: FaultInjector(0, timeout_s=-1), "timeout_s is -1"),
        (lambda: Outage(rate=2), "rate of an outage is 2"),
        (lambda: Outage(rate=0.1, min_steps=3, max_steps=2), "3 to 2 steps"),
        (lambda: Outage(rate=0.1, min_steps=0, max_steps=2), "0 to 2 steps"),
        (lambda: Outage(rate=0.1, kind=ErrorKind.NO_ACTION), "policy's own"),
        (lambda: Outage(rate=0.1, kind="no_action"), "'no_action' cannot be injected, it is the policy's own"),
        (lambda: Outage(rate=0.1, kind="tiemout"), f"'tiemout' cannot be injected.*no such kind.*{CHOICES}"),
        (lambda: FaultInjector(0, {"tiemout": 0.1}), f"'tiemout' cannot be injected.*no such kind.*{CHOICES}"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_kinds_may_be_written_as_text():
    assert FaultInjector(0, {"timeout": 1.0}).fault(key(), "x") is ErrorKind.TIMEOUT
    outage = Outage(rate=1.0, kind="backend_error")
    assert FaultInjector(0, outages={"x": outage}).fault(key(), "x") is ErrorKind.BACKEND_ERROR
