"""What strangers, a site or a server may send instead of what they should: it is refused with a sentence, in bounded
memory, and nothing that was learnt is lost."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from federations import Federated, advance, same_round

from fedloom.core.preprocessing import Preprocessing
from fedloom.data.user_data.merging import merge
from fedloom.deployment import own_data
from fedloom.deployment.host import Host
from fedloom.deployment.kinds import AGREE, FAILURE, HELLO, ORDER, SETUP
from fedloom.deployment.links import InProcess
from fedloom.deployment.messages import BadMessage, Message, decode, decode_parts

DIGITS = {"dataset": "digits", "algorithm": "fedavg", "clients": 3}


# -- bytes ----------------------------------------------------------------------------------------------------------


def tensors(about, data=b""):
    """A body of safetensors with this header."""
    header = json.dumps(about).encode()
    return len(header).to_bytes(8, "little") + header + data


def floats(shape, first, last):
    return {"dtype": "F32", "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    "body",
    [
        (2**50).to_bytes(8, "little") + b"{}",  # a header of a petabyte
        tensors({"0": floats([2**40], 0, 2**42)}, b"1234"),
        tensors({"0": floats([2**62, 2**62, 0], 0, 0)}),
        tensors({"0": floats([1], 0, 4), "1": floats([1], 0, 4)}, b"1234"),  # the same bytes twice
        tensors({"0": floats([1], 4, 0)}, b"1234"),
        tensors({"0": floats([-1], 0, 4)}, b"1234"),
        tensors({"w": floats([1], 0, 4)}, b"1234"),  # names are numbers
    ],
)
def test_a_body_that_claims_what_it_does_not_have_is_refused(body):
    with pytest.raises(BadMessage):
        decode_parts(json.dumps({"kind": "reply", "fields": {}, "trees": {"up": 0}}), body)


@pytest.mark.parametrize("depth", [2000, 500_000])
def test_fields_that_are_nested_deeply_are_refused(depth):
    with pytest.raises(BadMessage):
        decode_parts('{"kind": "failure", "fields": {"why": ' + "[" * depth + "]" * depth + '}, "trees": {}}', b"")


@pytest.mark.parametrize("stype", ["numpy.ndarray", "pickle", ""])
def test_only_plain_bytes_are_read_from_an_array(stype):
    """NumPy's format would be interpreted before FedLoom's checks."""
    assert read_records(b"ab") == ("{}", b"ab")
    with pytest.raises(not_a_message()):
        read_records(b"ab", stype=stype)


def test_an_array_above_the_limit_is_not_read(monkeypatch):
    from fedloom.deployment.flower import codec

    monkeypatch.setattr(codec, "MAX_BYTES", 200)
    assert read_records(b"x" * 200)[1] == b"x" * 200
    with pytest.raises(not_a_message(), match="more than"):
        read_records(b"x" * 201)


def test_a_header_above_the_limit_is_not_read():
    with pytest.raises(BadMessage, match="more than"):
        decode_parts('{"kind": "reply", "fields": {}, "trees": {}}' + " " * (65 << 20), b"")


def not_a_message():
    pytest.importorskip("flwr")
    from fedloom.deployment.flower.codec import NotAMessage

    return NotAMessage


def read_records(data, stype="fedloom.bytes"):
    """A message as Flower brings it, with an array of these bytes."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    from fedloom.deployment.flower.codec import from_records

    array = Array(dtype="uint8", shape=(len(data),), stype=stype, data=data)
    return from_records(RecordDict({"header": ConfigRecord({"header": "{}"}), "body": ArrayRecord({"body": array})}))


# -- a server with a bad site ---------------------------------------------------------------------------------------


class Bad(InProcess):
    """A link on which client 1 sends something else, made from its answer and those before it, when it has trained."""

    def __init__(self, sites):
        super().__init__(sites)
        self.change, self.before = None, []

    def _one(self, i, message):
        answer = super()._one(i, message)
        if i != 1 or "up" not in answer.trees:
            return answer
        self.before.append(answer)
        return answer if self.change is None else self.change(answer, self.before)


def nested(depth):
    made = []
    for _ in range(depth):
        made = [made]
    return made


def last(**changes):
    return lambda a, _: replace(
        a, fields={**a.fields, "results": [*a["results"][:-1], {**a["results"][-1], **changes}]}
    )


def upload(change):
    return lambda a, _: replace(a, trees={"up": change(a.tree("up"))})


def flat_names(up):
    """Names as in messages to people, which would be those of the right structure."""
    return {f"w/{name}": value for name, value in up["w"].items()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a, before: before[0], "its reply is one to another order"),  # a replay of its first upload
        (lambda a, _: Message(FAILURE, {"why": nested(900)}), "its site says: "),
        (last(n=nested(900)), "training samples"),
        (last(n=10**4000), "training samples"),
        (lambda a, _: Message("x\n\x1b[2J"), "its answer is no reply"),
        (lambda a, _: replace(a, trees={"up": {"w": torch.zeros(2**40, 0)}}), "is of another kind"),
        (last(computed=[10**400, 1]), "does not say what it computed"),
        (last(computed=[float("nan"), 1]), "does not say what it computed"),
        (last(scores={"post": {"val": [10**400, 0, 0], "test": [0, 0, 0]}}), "are not 3 numbers"),
        (last(scores={"post": {"val": [0, 0, 0], "test": [0, 0, 10**9]}}), "are of 1e+09 samples, but it has"),
        (last(scores={"post": {"val": [0, 0, 0], "test": [float("nan"), 0, 1]}}), "have nan right of 1 samples"),
        (last(scores={"post": {"val": [0, 0, 0], "test": [2, 0, 1]}}), "have 2 right of 1 samples"),
        (upload(lambda up: {**up, "w/": torch.zeros(1)}), "'up/w/' was not asked for"),
        (upload(lambda up: flat_names(up)), "'up/w' is missing"),
        (upload(lambda up: {"w": tuple(up["w"].values())}), "'up/w' is of another kind"),
    ],
)
def test_a_site_that_sends_anything_else_is_left_out(change, said, tmp_path, caplog):
    federated = Federated("ditto", tmp_path, wrap=Bad, minimum=2, repeats=0, trains_ahead=False)
    same_round(advance(federated.server), advance(federated.simulation))
    federated.link.change = change
    same_round(advance(federated.server), advance(federated.simulation, cohort=np.array([0, 2])))
    assert said in caplog.text
    federated.link.change = None
    same_round(advance(federated.server), advance(federated.simulation))
    federated.same_state()


def test_what_a_site_says_cannot_write_lines_or_move_the_cursor_in_the_log(tmp_path, caplog):
    federated = Federated("fedavg", tmp_path, wrap=Bad, minimum=2, repeats=0, trains_ahead=False)
    federated.link.change = lambda a, _: Message(FAILURE, {"why": "\x1b[2J\nRound 9: all is well"})
    advance(federated.server)
    (said,) = (record.getMessage() for record in caplog.records if "left out" in record.getMessage())
    assert said.isprintable()


def test_a_site_cannot_claim_more_samples_than_memory_holds(tmp_path):
    from fedloom.core.errors import UserError
    from fedloom.deployment.serve import Server, Terms

    class Claims(Host):
        def handle(self, message):
            answer = super().handle(message)
            if message.kind == AGREE:
                answer = replace(answer, fields={**answer.fields, "samples": {"train": 10**14, "val": 0, "test": 2}})
            return answer

    sites = {i: Claims(i, tmp_path / f"site-{i}", table(tmp_path / f"{i}.csv")) for i in range(2)}
    with pytest.raises(UserError):
        Server(InProcess(sites), Terms(repeats=0)).run_on_own_data({"algorithm": "fedavg", "rounds": 1}, 2)


# -- a site with a bad server ---------------------------------------------------------------------------------------


def table(path):
    """What a site with a table of its own has decided."""
    lines = [f"{k % 7},{k % 5},{'ab'[k % 2]}" for k in range(40)]
    path.write_text("\n".join(["x,z,label", *lines]))
    return {"dataset": {"name": "own", "path": str(path)}, "device": "cpu"}


def named(folder):
    return Host(0, folder / "site", {"dataset": "digits", "device": "cpu"})


def setup(run="run", **config):
    fields = {"client": 0, "run": run, "mean_samples": 9.0, "config": {**DIGITS, **config}}
    return Message(SETUP, fields, {"constants": {}})


def own_setup(host, **changes):
    """A message that sets up a run on a site's own data."""
    config = {"dataset": {"name": "own"}, "algorithm": "fedavg"}
    fields = {"client": 0, "run": "agreement", "config": config}
    offered = Preprocessing.from_json(host.handle(Message(HELLO, fields))["about"])
    about = merge({"site": offered}).to_json()
    more = {"about": about, "split": [0.7, 0.1, 0.2], "partition_seed": 1, "stratify": True}
    counted = host.handle(Message(AGREE, {**fields, **more}))
    agreed = own_data.Preprocessing.from_json(about)
    final = own_data.scaled(agreed, own_data.from_json(counted["moments"], agreed), True).to_json()
    usual = {**fields, **more, "run": "run", "final": final, "clients": 3, "batch_size": 5, "mean_samples": 9.0}
    return Message(SETUP, {**usual, **changes}, {"constants": {}})


NAMES = ["../x", "a/b", "/tmp/x", "", ".", "..", "A", "x" * 65, "a\0b", "a\n", None, 3, ["x"], {"a": 1}]


@pytest.mark.parametrize("kind", [HELLO, AGREE, SETUP, ORDER])
@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_run_leads_nowhere(kind, name, tmp_path):
    answer = named(tmp_path).handle(replace(setup(name), kind=kind))
    assert (answer.kind, "the name of a run consists of" in answer["why"]) == (FAILURE, True)
    assert not list(tmp_path.iterdir())


FILES = [{"name": "fedavg", "from": "{}"}, "{}", "{}:Mine", {"name": "{}"}, "os:path", "colorsys:X"]


@pytest.mark.parametrize("method", FILES)
def test_a_server_cannot_have_a_site_load_code(method, tmp_path):
    """Neither a file that is at the site, nor a module that is installed there."""
    code, trace = tmp_path / "code.py", tmp_path / "was-loaded"
    code.write_text(
        "from fedloom.algorithms.fedavg import FedAvg\n"
        f"open({str(trace)!r}, 'w')\n"
        "class Mine(FedAvg):\n"
        "    name = 'mine'\n"
    )
    place = json.loads(json.dumps(method).replace("{}", str(code)))
    own = Host(0, tmp_path / "own", table(tmp_path / "own.csv"))
    for host, message in ((named(tmp_path), setup()), (own, own_setup(own))):
        fields = {**message.fields, "config": {**message["config"], "algorithm": place}}
        answer = host.handle(replace(message, fields=fields))
        assert answer.kind == FAILURE
        assert "install it as a package here" in answer["why"]
        assert not trace.exists()


def test_a_server_cannot_choose_the_files_of_a_site(tmp_path):
    refused = named(tmp_path).handle(setup(dataset={"name": "digits", "path": "/etc/passwd"}))
    assert "Unknown setting 'dataset.path'" in refused["why"]
    host = Host(0, tmp_path / "own", table(tmp_path / "own.csv"))
    config = {"dataset": {"name": "own", "path": "/etc/passwd"}, "algorithm": "fedavg", "data_dir": "/etc"}
    assert host.handle(own_setup(host, config=config)).kind == "ready"
    assert host._last[1].clients.task.data.x.shape == (40, 2)


BAD_FIELDS = [
    {"batch_size": "x"}, {"batch_size": 0}, {"batch_size": -3}, {"batch_size": 10**30}, {"mean_samples": "x"},
    {"mean_samples": None}, {"split": [1]}, {"split": "abc"}, {"partition_seed": None}, {"partition_seed": -1},
    {"clients": 0}, {"clients": -5},
]  # fmt: skip
FINE_FIELDS = [{"about": None}, {"about": {}}, {"final": []}, {"split": [0, 0, 0]}, {"config": None}, {"config": []}]


@pytest.mark.parametrize("wrong", [*FINE_FIELDS, *BAD_FIELDS])
def test_a_setup_that_cannot_be_is_refused_with_a_sentence(wrong, tmp_path):
    host = Host(0, tmp_path / "site", table(tmp_path / "own.csv"))
    answer = host.handle(own_setup(host, **wrong))
    assert answer.kind == FAILURE
    assert answer["why"]


def test_an_order_that_comes_late_or_twice_does_not_remove_newer_state(tmp_path):
    """It may have waited while the server went on without this site."""
    federated = Federated("ditto", tmp_path, trains_ahead=False)
    for _ in range(3):
        same_round(advance(federated.server), advance(federated.simulation))
    for order in [decode(order) for i, order, _ in federated.link.log if i == 1]:
        federated.sites[1].handle(order)
        assert federated.sites[1].store.rounds() >= {2}
    same_round(advance(federated.server), advance(federated.simulation))
    federated.same_state()
