"""No function of the scheduler and its cache changes what it is given.

Random workloads call every public function; each call's arguments are copied before and compared
after, and a state that was left behind goes on as if nothing had happened.
"""

import copy
import dataclasses
import importlib
import inspect
import pkgutil
import types
from collections import Counter
from collections.abc import Iterator

import pytest

import servespec.reference.cache
import servespec.reference.scheduling
from servespec.conformance.workloads.driver import drive
from servespec.conformance.workloads.scheduling import make_case, matrix
from servespec.reference.contracts import PauseState, Quirks, RequestStatus
from servespec.reference.scheduling import v1
from servespec.reference.scheduling.admission import check_request

# Checked by the tests of their own.
OTHERS = ("v0", "memory", "planner")

# Every call of a function is checked up to this many, then one in as many.
OFTEN = 50


def modules():
    for package in (servespec.reference.cache, servespec.reference.scheduling):
        for found in pkgutil.iter_modules(package.__path__):
            if not found.name.startswith(OTHERS):
                yield importlib.import_module(f"{package.__name__}.{found.name}")


def public_functions():
    return {
        value
        for module in modules()
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    }


def contents(value):
    """Return what could be changed inside a value: copies of its mappings, lists and sets."""
    if isinstance(value, (dict, list, set)):
        inside = value.values() if isinstance(value, dict) else value
        return type(value)(value), [contents(part) for part in inside]
    if dataclasses.is_dataclass(value):
        return [contents(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple):
        # Most tuples hold numbers or names alone.
        return [contents(part) for part in value if not isinstance(part, (int, str, bytes))]
    return value


def watched(function, calls):
    def call(*args, **kwargs):
        args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
        calls[function] += 1
        if calls[function] > OFTEN and calls[function] % OFTEN:
            return function(*args, **kwargs)
        before = contents((*args, *kwargs.values()))
        result = function(*args, **kwargs)
        assert contents((*args, *kwargs.values())) == before, function.__qualname__
        return result

    return call


class Pure:
    """The reference with the calls of a driver."""

    def __init__(self, config):
        self.args = config.scheduler, config.cache, config.speculative
        self.state = v1.initial_state(*self.args)

    def add_request(self, request):
        self.state = v1.add_request(self.state, request)

    def schedule(self, throttle=False):
        self.state, output = v1.schedule(self.state, throttle)
        v1.snapshot(self.state)
        v1.has_unfinished_requests(self.state)
        v1.has_finished_requests(self.state)
        return output

    def update_from_output(self, output, sampled):
        self.state, outputs = v1.update_from_output(self.state, output, sampled)
        return outputs

    def update_draft_token_ids(self, drafts):
        self.state = v1.update_draft_token_ids(self.state, drafts)

    def finish_requests(self, names, status):
        self.state = v1.finish_requests(self.state, names, status)

    def set_pause_state(self, pause):
        self.state = v1.set_pause_state(self.state, pause)

    def reset_prefix_cache(self, running=False):
        self.state, done = v1.reset_prefix_cache(self.state, running)
        return done


def test_arguments_stay_as_they_were(monkeypatch):
    calls = Counter()
    functions = public_functions()
    for module in modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and value in functions:
                monkeypatch.setattr(module, name, watched(value, calls))
    # Hits that end inside a block are the rarest thing, so they get cases of their own.
    fine = [c for c in matrix() if c.layout == "hybrid align" and c.enable_prefix_caching]
    for number, combination in enumerate((*matrix()[::7], *fine[::2])):
        quirks = Quirks() if number % 2 else Quirks.vllm_0_27_1()
        config, workload = make_case(combination, number, quirks)
        pure = Pure(config)
        for request in workload.requests:
            importlib.import_module(check_request.__module__).blocks_alone(request, *pure.args)
        for driven in drive(pure, workload, config):
            if driven.step == 30:
                break
    print({function.__name__: count for function, count in sorted(calls.items(), key=str)})
    assert {function.__qualname__ for function in functions - set(calls)} == {"check_request"}


def test_a_state_can_be_continued_twice(driver):
    d = driver(caching=True).add("a", 9).add("b", 3)
    d.step()
    first, second = d.fork(), d.fork()
    for other in (first, second):
        other.step(a=(5,), b=(6,))
        other.finish("b")
        other.reset(running=True)
        other.pause(PauseState.PAUSED_NEW)
    assert first.state == second.state
    assert d.schedule() == {"a": 1, "b": 1}


def test_checking_and_ending_change_nothing(driver):
    d = driver(caching=True).add("a", 9)
    d.schedule()
    before, names = copy.deepcopy(d.state), ["a"]
    check_request(d["a"].request, d.state.config, d.state.cache_config)
    v1.finish_requests(d.state, names, RequestStatus.FINISHED_ABORTED)
    assert (d.state, names) == (before, ["a"])


def test_values_refuse_to_be_changed(driver):
    d = driver().add("a", 3)
    for value, name in ((d.state, "running"), (d["a"], "status"), (d.state.cache, "pool")):
        with pytest.raises(AttributeError):
            setattr(value, name, None)
