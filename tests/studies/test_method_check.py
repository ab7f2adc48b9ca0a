"""`fedloom check` passes all methods that come with FedLoom, and finds planted mistakes."""

import pytest
from helpers import method, run_cli

import fedloom
from fedloom.config.methods import load_method
from fedloom.core.algorithm import ALGORITHMS
from fedloom.studies.method_check import check_method

GOOD = """
from dataclasses import dataclass

import torch

from fedloom.core.algorithm import Algorithm, Phase
from fedloom.core.settings import setting


@dataclass(frozen=True)
class Mine(Algorithm):
    name = "mine"
    shared = "model w"
    lam: float = setting(0.5, "pull")

    def init_server(self, task, key):
        return {"w": task.init(key)}

    def init_client(self, task, key, key_i):
        return {"v": task.init(key)}

    def begin(self, task, down, state, info):
        return {"w": task.slot(down["w"]), "v": task.slot(state["v"])}

    def phases(self, task):
        return [Phase(self.step, task.epochs)]

    def step(self, task, work, batch, down, info):
        g, w = task.grad(work["w"], batch)
        h, v = task.grad(work["v"], batch)
        h = {k: h[k] + self.lam * (v.params[k] - down["w"][k]) for k in h}
        return {"w": task.step(w, g), "v": task.step(v, h)}

    def finish(self, task, work, down, state, info):
        return {"v": work["v"].params}, {"w": work["w"].params}

    def aggregate(self, task, server, up, info, t, key):
        return {"w": task.average(up["w"], info.n)}

    def model(self, task, work, down, info):
        return work["v"]
"""
STEP = '        g, w = task.grad(work["w"], batch)\n'
FINISH = 'return {"v": work["v"].params}, {"w": work["w"].params}'
AGGREGATE = 'return {"w": task.average(up["w"], info.n)}'
MISTAKES = {  # what is replaced, by what, the check that fails, words of its sentence
    "unkeyed draw": (
        STEP,
        STEP + "        g = {k: x + torch.randn_like(x) for k, x in g.items()}\n",
        "repeatable",
        "key",
    ),
    "global draw": (AGGREGATE, "torch.manual_seed(0); " + AGGREGATE, "random numbers", "torch"),
    "branch": (STEP, STEP + '        if g["head.bias"].sum() > 0:\n            pass\n', "stacked", "line"),
    "no key": (FINISH, 'return {}, {"w": work["w"].params}', "structure", "finish of 'mine' returned no 'v'"),
    "no upload": (FINISH, 'return {"v": work["v"].params}, {}', "structure", "aggregate of 'mine' asks for 'w'"),
    "nothing": (AGGREGATE, "pass", "structure", "aggregate of 'mine' returned nothing"),
    "old state": (FINISH, 'return state, {"w": work["w"].params}', "private state", "'v'"),
    "private sent": (FINISH, FINISH.replace(', {"w"', ', {"v": work["v"].params, "w"'), "traffic", "'v'"),
    "undeclared": ('shared = "model w"', 'shared = "nothing"', "traffic", "shared"),
    "order": (AGGREGATE, 'return {"w": {k: x[0] for k, x in up["w"].items()}}', "order of clients", "order"),
    "fedavg": ('return work["v"]', 'return work["w"]', "not a baseline", "fedavg"),
    "no training": (FINISH, 'return {"v": down["w"]}, {"w": down["w"]}', "learning", "loss"),
    "not finite": (AGGREGATE, 'return {"w": {k: x.mean(0) / 0 for k, x in up["w"].items()}}', "finite values", "NaN"),
    "other shape": (FINISH, FINISH.replace('{"v": work["v"].params}', '{"v": {}}'), "structure", "finish"),
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a method's file; the registry forgets its method after the test."""
    known = {name: ALGORITHMS[name] for name in ALGORITHMS.names()}
    monkeypatch.setattr(ALGORITHMS, "_known", known)

    def write(text=GOOD, name="mine.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


# one of each kind: agents, adaptation, conditions, turns, server data, own logits, own batches; parity tests have all
KINDS = (
    "dap-fl",
    "fedala",
    "fedavg-ft",
    "fedbabu",
    "fedfomo",
    "fedproto",
    "gpfl",
    "local",
    "page",
    "per-fedavg",
    "pfedhn",
)


@pytest.mark.parametrize("name", [*KINDS, "pfedkt", "scaffold"])
def test_methods_of_fedloom_pass(name):
    verdict = check_method(method(name))
    assert verdict.ok, [f for f in verdict.findings if not f.ok]


def test_a_good_method_passes(own):
    verdict = check_method(load_method(str(own()))())
    assert verdict.ok, [f for f in verdict.findings if not f.ok]
    assert verdict.sentence == "mine passes all 12 checks."


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake, own):
    old, new, name, words = MISTAKES[mistake]
    assert GOOD.count(old) == 1
    verdict = check_method(load_method(str(own(GOOD.replace(old, new))))())
    failed = {f.name: f.sentence for f in verdict.findings if f.ok is False}
    assert name in failed, failed
    assert words in failed[name]


def test_an_empty_class_lists_what_is_missing(own):
    text = "from fedloom.core.algorithm import Algorithm\nclass Empty(Algorithm):\n    name = 'empty'\n"
    (first, *_) = check_method(load_method(str(own(text)))()).findings
    assert "begin, phases, finish and model" in first.sentence


def test_the_command_prints_a_verdict(own, monkeypatch, capsys):
    code, out, _ = run_cli(monkeypatch, capsys, "check", own(), "--set", "lam=0.3")
    assert code == 0
    assert "mine passes all 12 checks." in out
    code, out, _ = run_cli(monkeypatch, capsys, "check", own(GOOD.replace(AGGREGATE, "pass")))
    assert code == 1
    assert "1 of 12 checks failed" in out


def test_a_check_shows_no_warnings_beside_its_findings(own, monkeypatch, capsys, caplog):
    file = own(GOOD.replace(STEP, STEP + "        if g['head.bias'].sum() > 0:\n            g = g\n"))
    code, out, err = run_cli(monkeypatch, capsys, "check", file)
    assert code == 1
    assert "branches on the value of a tensor" in out
    assert err == caplog.text == ""


def test_a_run_names_the_line_that_keeps_clients_from_being_stacked(own, caplog):
    found = load_method(str(own(GOOD.replace(STEP, STEP + "        if g['head.bias'].sum() > 0: pass\n"))))
    fedloom.run(found, clients=4, rounds=1)
    assert caplog.text.count("Clients are trained one by one") == 1
    assert "step of 'mine' branches on the value of a tensor" in caplog.text
    assert "line 30: if g['head.bias'].sum() > 0: pass" in caplog.text
