"""Sites with data of their own agree on columns, words, classes and scales, and then train as one federation."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedloom import load
from fedloom.core.errors import UserError
from fedloom.core.preprocessing import Column, Preprocessing
from fedloom.data.moments import Moments, merge_moments
from fedloom.data.sets.own import OwnData
from fedloom.data.user_data.merging import merge
from fedloom.deployment.dry_run import what_is_sent
from fedloom.deployment.host import Host
from fedloom.deployment.kinds import AGREE, HELLO
from fedloom.deployment.links import InProcess
from fedloom.deployment.messages import Message, decode
from fedloom.deployment.own_data import LocalSamples, make_schema, read_schema
from fedloom.deployment.serve import Server, Terms
from fedloom.deployment.site_models import SiteModels

TERMS = Terms(repeats=0)
WORDS = (["icu", "ward"], ["er", "ward"], ["icu"])
CLASSES = (["2", "10"], ["10", "other"], ["2"])  # the last site has one class only


def rows(i, n=40):
    """A table of site i: a number whose mean is large beside its spread, words, a class."""
    draw = np.random.default_rng(i)
    found = []
    for _ in range(n):
        label = CLASSES[i][draw.integers(len(CLASSES[i]))]
        stamp = 1.7e9 + 3 * i + draw.normal()
        found.append((draw.normal(50 + 20 * (label == "10"), 5), WORDS[i][draw.integers(len(WORDS[i]))], stamp, label))
    return found


def write_csv(path, table, header="age,ward,stamp,label"):
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in table)]) + "\n")
    return path


def host(tmp_path, i, path, **options):
    local = {"dataset": {"name": "own", "path": str(path), **options}, "device": "cpu"}
    return Host(i, tmp_path / f"site-{i}", local)


def three_sites(tmp_path, **options):
    return {i: host(tmp_path, i, write_csv(tmp_path / f"{i}.csv", rows(i)), **options) for i in range(3)}


def serve(sites, tmp_path=None, resume=False, **asked):
    link, out = InProcess(sites), None if tmp_path is None else tmp_path / "run"
    usual = {"algorithm": "fedavg", "rounds": 2, **asked}
    return Server(link, TERMS).run_on_own_data(usual, len(sites), out=out, resume=resume), link


def run_folder(tmp_path, i):
    """The folder in which site i keeps its run."""
    (found,) = (path for path in (tmp_path / f"site-{i}").iterdir() if path.is_dir())
    return found


@pytest.mark.parametrize("method", ["fedavg", "ditto", "gpfl", "pfedkt", "plgu-lf"])
def test_methods_learn_from_data_that_stay_at_the_sites(method, tmp_path):
    result, _ = serve(three_sites(tmp_path), algorithm=method, rounds=12, lr=0.05)
    assert result.last()["pre_acc_mean"] > 70


def test_words_and_classes_are_those_of_all_sites(tmp_path):
    serve(three_sites(tmp_path), tmp_path)
    found = json.loads((tmp_path / "run" / "preprocessing.json").read_text())
    assert found["classes"] == ["10", "2", "other"]
    assert [(c["name"], c["words"]) for c in found["columns"]] == [
        ("age", None), ("ward", ["er", "icu", "ward"]), ("stamp", None)
    ]  # fmt: skip


def test_scales_are_those_of_all_training_samples(tmp_path):
    """Also of a column whose mean is a billion times its spread."""
    serve(three_sites(tmp_path), tmp_path)
    about = Preprocessing.from_json(json.loads((tmp_path / "run" / "preprocessing.json").read_text()))
    samples = [
        LocalSamples(OwnData(str(tmp_path / f"{i}.csv")), replace(about, numbers=None), (0.7, 0.1, 0.2), 1, True)
        for i in range(3)
    ]
    every, numbers = np.concatenate([one.x[one.splits["train"]] for one in samples]), about.to_json()["numbers"]
    for column in (0, 4):
        assert numbers["mean"][column] == pytest.approx(every[:, column].mean(), rel=1e-12)
        assert numbers["std"][column] == pytest.approx(every[:, column].std(), rel=1e-6)
    assert numbers["mean"][1:4] == [0, 0, 0]
    assert numbers["std"][1:4] == [1, 1, 1]


def test_a_site_with_other_samples_is_scored_on_its_own_classes(tmp_path):
    """Class indices mean the same everywhere: a model that knows site 0 only is right about the class 2 at site 2."""
    result, _ = serve(three_sites(tmp_path), algorithm="local", rounds=5)
    last = result.clients.to_pandas().query("round == 5").set_index("client")
    assert last.loc[2, "pre_acc"] == 100  # it has one class


def test_a_run_on_own_data_continues(tmp_path):
    whole, _ = serve(three_sites(tmp_path), tmp_path, algorithm="ditto", rounds=4)
    other = tmp_path / "other"
    other.mkdir()
    serve(three_sites(other), other, algorithm="ditto", rounds=2)
    again, link = serve(three_sites(other), other, resume=True, algorithm="ditto", rounds=4)
    kinds = [decode(order).kind for _, order, _ in link.log]
    assert set(kinds) == {"order", "end"}  # nothing is agreed on again
    assert [repr(row) for row in again.rounds] == [repr(row) for row in whole.rounds]
    assert len(load(other / "run").rounds) == 4


def test_before_training_only_descriptions_and_moments_are_sent(tmp_path):
    _, link = serve(three_sites(tmp_path))
    fields = {}
    for _, _, answer in link.log:
        reply = decode(answer)
        if reply.kind != "reply":
            fields[reply.kind] = set(reply.fields)
            assert not reply.trees
        if reply.kind == "counted":
            assert {len(values) for values in reply["moments"]["x"]} == {2}  # age and stamp: words are not counted
        for row in rows(0):
            assert str(row[0]).encode() not in answer  # no value of a sample
    assert fields == {
        "offer": {"client", "version", "about", "normalise"},
        "counted": {"client", "version", "samples", "moments"},
        "ready": {"client", "run"},
        "done": {"client", "run"},
    }


# -- what a server may not ask


def asks(site, **changes):
    """The answer to a server that wants samples to be encoded and divided in some way."""
    fields = {"client": 0, "run": "agreement", "config": {"dataset": {"name": "own"}, "algorithm": "fedavg"}}
    offered = Preprocessing.from_json(site.handle(Message(HELLO, fields))["about"])
    about = replace(
        merge({"site": offered}), **{k: v for k, v in changes.items() if k in ("columns", "classes", "shape")}
    )
    usual = {"about": about.to_json(), "split": [0.7, 0.1, 0.2], "partition_seed": 1, "stratify": True}
    return site.handle(Message(AGREE, {**fields, **usual, **{k: v for k, v in changes.items() if k in usual}}))


@pytest.mark.parametrize(
    "changes",
    [
        {"columns": (Column("age"), Column("stamp"), Column("patient")), "shape": (3,)},  # one that the site ignores
        {"columns": (Column("age"),), "shape": (1,)},
        {"columns": (Column("age"), Column("ward", ("er",)), Column("stamp")), "shape": (3,)},
        {"classes": ("10",)},  # the number of samples would be that of one class
    ],
)
def test_a_server_cannot_choose_what_is_counted(changes, tmp_path, caplog):
    table = [(a, b, c, 7000 + k, d) for k, (a, b, c, d) in enumerate(rows(0))]
    path = write_csv(tmp_path / "0.csv", table, "age,ward,stamp,patient,label")
    site = host(tmp_path, 0, path, ignore="patient")
    answer = asks(site, **changes)
    assert (answer.kind, answer.fields.keys()) == ("failure", {"client", "why"})


def test_other_sites_may_have_more_classes(tmp_path):
    assert asks(three_sites(tmp_path)[0], classes=("10", "2", "other")).kind == "counted"


@pytest.mark.parametrize("changes", [{"partition_seed": 2}, {"split": [0.5, 0.1, 0.4]}, {"stratify": False}])
def test_samples_are_divided_in_one_way_only(changes, tmp_path):
    """Moments of several divisions would tell the values of single samples."""
    site = three_sites(tmp_path)[0]
    first = asks(site)
    assert first.kind == "counted"
    answer = asks(site, **changes)
    assert "asks for another encoding or division of this site's samples than before" in answer["why"]
    assert asks(site).fields == first.fields
    (tmp_path / "site-0" / "agreement.json").unlink()
    assert asks(site, **changes).kind == "counted"


def test_moments_of_few_samples_are_not_sent(tmp_path, caplog):
    site = host(tmp_path, 0, write_csv(tmp_path / "0.csv", rows(0)))
    assert asks(site, split=[0.05, 0, 0.95]).kind == "failure"
    assert "so few that moments would tell of single ones" in caplog.text


@pytest.mark.parametrize(
    "answer",
    [
        {"samples": {"train": 10**14, "val": 0, "test": 2}},
        {"samples": {"train": 1.5, "val": 0, "test": 2}},
        {"samples": None},
        {"moments": {"x": [[1e999], [0], [0]]}},
        {"moments": {"x": [[10**400, 1], [0, 0], [0, 0]]}},
        {"moments": 3},
    ],
)
def test_a_site_that_says_anything_else_of_its_data_is_named(answer, tmp_path):
    class Claims(Host):
        def handle(self, message):
            found = super().handle(message)
            return replace(found, fields={**found.fields, **answer}) if message.kind == AGREE else found

    sites = three_sites(tmp_path)
    sites[1] = Claims(1, tmp_path / "claims", sites[1].local)
    with pytest.raises(UserError, match="Site 1 does not say what it has"):
        serve(sites)


# -- a schema


def test_sites_with_a_schema_take_no_other(tmp_path):
    sites = three_sites(tmp_path)
    serve(sites, tmp_path)
    path = tmp_path / "run" / "preprocessing.json"
    schema = read_schema(path)
    others = {i: Host(i, tmp_path / f"new-{i}", {**site.local, "schema": str(path)}) for i, site in sites.items()}
    link = InProcess(others)
    Server(link, TERMS).run_on_own_data({"algorithm": "fedavg", "rounds": 1}, 3, schema=schema)
    assert all(not answer["moments"] for _, _, data in link.log if (answer := decode(data)).kind == "counted")
    wrong = replace(schema, numbers=replace(schema.numbers, mean=tuple(v + 1 for v in schema.numbers.mean)))
    with pytest.raises(UserError, match="its data cannot be used; what is wrong with them is said at the site"):
        Server(InProcess(others), TERMS).run_on_own_data({"algorithm": "fedavg", "rounds": 1}, 3, schema=wrong)


def test_a_schema_makes_texts_possible(tmp_path):
    """Their vocabulary cannot be agreed on without sending words."""
    for i in range(3):
        lines = [f"{'good fine' if k % 2 else 'bad poor'} thing {k % 3},{'yes' if k % 2 else 'no'}" for k in range(30)]
        write_csv(tmp_path / f"{i}.csv", [(line,) for line in lines], "text,label")
    schema = make_schema(OwnData(str(tmp_path / "2.csv")))
    assert schema.kind == "text"
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema.to_json()))
    sites = {
        i: Host(i, tmp_path / f"site-{i}", {**host(tmp_path, i, tmp_path / f"{i}.csv").local, "schema": str(path)})
        for i in range(2)
    }
    asked = {"algorithm": "fedper", "rounds": 8, "lr": 0.5}
    result = Server(InProcess(sites), TERMS).run_on_own_data(asked, 2, schema=schema)
    assert result.last()["pre_acc_mean"] > 90


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"kind": "table"}'])
def test_what_is_no_schema(text, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"x\.json is no schema; make one with 'fedloom data schema'"):
        read_schema(path)
    with pytest.raises(UserError, match=r"absent\.json cannot be read"):
        read_schema(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"header": "age,ward,time,label"}, "Site 1 has no column 'stamp', which Site 0 has"),
        ({"header": "age,ward,stamp,other,label", "extra": True}, "Site 1 has a column 'other', which Site 0 has not"),
        ({"ward": "7"}, "Column 'ward' has numbers at Site 1 and words at Site 0"),
        ({"missing": "mean"}, "Site 0 has the setting missing= refuse, but Site 1 has mean"),
        ({"normalise": False}, "Some sites have normalise=true and some have not"),
        ({"path": "absent.csv"}, "The run cannot begin without the sites 1"),
    ],
)
def test_sites_that_do_not_fit_together_are_named(change, said, tmp_path):
    table = rows(1)
    if "ward" in change:
        table = [(a, change["ward"], b, c) for a, _, b, c in table]
    if "extra" in change:
        table = [(a, b, c, 1, d) for a, b, c, d in table]
    sites = three_sites(tmp_path)
    path = write_csv(tmp_path / "1.csv", table, change.get("header", "age,ward,stamp,label"))
    options = {k: v for k, v in change.items() if k in ("missing", "normalise")}
    sites[1] = host(tmp_path, 1, tmp_path / change.get("path", path), **options)
    with pytest.raises(UserError, match=said):
        serve(sites)


def test_missing_numbers_become_the_mean_of_all_sites(tmp_path):
    sites = {}
    for i in range(3):
        table = [("" if k == 3 else a, b, c, d) for k, (a, b, c, d) in enumerate(rows(i))]
        sites[i] = host(tmp_path, i, write_csv(tmp_path / f"{i}.csv", table), missing="mean")
    serve(sites, tmp_path)
    numbers = json.loads((tmp_path / "run" / "preprocessing.json").read_text())["numbers"]
    assert numbers["fill"][0] == numbers["mean"][0]
    for i, site in sites.items():
        made = site._last[1].clients.task.data
        assert np.isfinite(made.x.numpy()).all()
        assert (made.x[:, 0] == 0).sum() == 1, i


def test_numbers_as_targets_are_scaled_alike(tmp_path):
    sites = {}
    for i in range(3):
        table = [(a, b, c, 3 * a + 100 * i) for a, b, c, _ in rows(i)]
        path = write_csv(tmp_path / f"{i}.csv", table)
        sites[i] = host(tmp_path, i, path, target="number")
    result, _ = serve(sites, tmp_path, algorithm="ditto", rounds=20)
    assert result.metric == "rmse"
    assert result.last()["pre_rmse_mean"] < 60  # the standard deviation of a site's targets is about 30


def test_arrays_and_pictures(tmp_path):
    for kind, shape in (("array", (6,)), ("image", (8, 8, 3))):
        sites = {}
        for i in range(2):
            draw = np.random.default_rng(i)
            x = (
                draw.integers(0, 255, (20, *shape), dtype=np.uint8)
                if kind == "image"
                else draw.normal(size=(20, *shape))
            )
            path = tmp_path / f"{kind}{i}.npz"
            np.savez(path, x=x, y=draw.integers(0, 3, 20))
            sites[i] = host(tmp_path / kind, i, path)
        result, _ = serve(sites, rounds=1)
        assert result.last()["cohort"] == 2


def preprocessing(**changes):
    usual = {
        "kind": "table",
        "shape": (2,),
        "dtype": "float64",
        "classes": ("0", "1"),
        "columns": (Column("a"), Column("b")),
    }
    return Preprocessing(**{**usual, **changes})


def test_the_first_site_decides_about_the_order_of_columns():
    other = preprocessing(columns=(Column("b"), Column("a")))
    assert merge({"x": preprocessing(), "y": other}).columns == (Column("a"), Column("b"))


def test_classes_are_ordered_by_value_if_they_are_numbers():
    names = merge({"x": preprocessing(classes=("2", "10")), "y": preprocessing(classes=("1.5", "2"))}).classes
    assert names == ("1.5", "2", "10")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (preprocessing(kind="image"), "x has rows of a table, but y has pictures"),
        (preprocessing(target="number"), "The target of x is classes, but that of y is a number"),
        (preprocessing(dtype="float32"), "x has samples of the type float64, but y has float32"),
        (preprocessing(kind="text"), "Texts need a common vocabulary"),
    ],
)
def test_what_cannot_be_merged(other, said):
    with pytest.raises(UserError, match=said):
        merge({"x": preprocessing(), "y": other})


def test_merged_moments_are_those_of_all_values():
    draw = np.random.default_rng(3)
    parts = [1e9 + draw.normal(size=(n, 3)) * [1, 5, 0] for n in (1, 40, 0, 7)]
    for part in parts:
        part[: len(part) // 3, 1] = np.nan
    whole, merged = np.concatenate(parts), merge_moments([Moments.of(part) for part in parts])
    assert merged.n.tolist() == (~np.isnan(whole)).sum(0).tolist()
    assert merged.mean == pytest.approx(np.nanmean(whole, 0), rel=1e-15)
    assert merged.std == pytest.approx(
        np.nanstd(whole, 0), rel=1e-6
    )  # the mean of the first column is a billion times its spread


@pytest.mark.parametrize("method", ["fedavg", "fedavg-ft", "ditto", "gpfl", "pfedkt", "fedproto"])
def test_a_site_keeps_the_models_that_it_is_scored_with(method, tmp_path):
    """Of the last round and of the round that is best on the validation data of all."""
    sites = three_sites(tmp_path)
    result, link = serve(sites, tmp_path, algorithm=method, rounds=6, lr=0.2)
    rounds = {"best": result.best_on_validation()["round"], "last": 6}
    about = next(message for _, order, _ in link.log if (message := decode(order)).kind == "agree")
    for i in sites:
        samples = LocalSamples(sites[i].own, Preprocessing.from_json(about["about"]), (0.7, 0.1, 0.2), 1, True)
        x, y = (torch.from_numpy(v[samples.splits["test"]]) for v in (samples.x, samples.y))
        models = load(run_folder(tmp_path, i))
        assert models.rounds == rounds
        for when, t in rounds.items():
            right = (models.model(when=when).predictions(x).argmax(1) == y).double().mean()
            (row,) = (row for row in result.clients.to_pylist() if (row["round"], row["client"]) == (t, i))
            assert row["pre_acc"] == pytest.approx(100 * float(right)), (i, when)
    assert models.predict(tmp_path / "2.csv").column("label").to_pylist() == ["2"] * 40
    with pytest.raises(UserError, match="has the models of client 2 only, not of 'Rome'"):
        models.model("Rome")


def test_a_site_that_missed_the_best_round_says_so(tmp_path):
    sites = three_sites(tmp_path)
    serve(sites, tmp_path, rounds=3)
    folder = run_folder(tmp_path, 0)
    models = SiteModels(folder, json.loads((folder / "models.json").read_text()))
    models.end(best=2)
    with pytest.raises(UserError, match="was not there after round 2, which is the best; ask for when=last"):
        load(folder).model()
    assert load(folder).model(when="last").classes == ("10", "2", "other")


def test_a_table_of_words_has_nothing_to_scale(tmp_path):
    sites = {}
    for i in range(2):
        path = write_csv(tmp_path / f"{i}.csv", [(b, d) for _, b, _, d in rows(i)], "ward,label")
        sites[i] = host(tmp_path, i, path)
    assert len(serve(sites, tmp_path)[0].rounds) == 2


def test_a_dry_run_lists_what_would_be_sent_and_sends_nothing_else(tmp_path):
    local = {"dataset": {"name": "own", "path": str(write_csv(tmp_path / "0.csv", rows(0)))}, "device": "cpu"}
    listed = what_is_sent(2, local, "gpfl")
    _, link = serve(three_sites(tmp_path), algorithm="gpfl", rounds=1)
    sent = {message.kind: message for i, _, answer in link.log if i == 0 and (message := decode(answer)).kind}
    names = {one.name.partition(".")[0] for one in listed if "/" not in one.name}
    assert names == {name for message in sent.values() for name in message.fields} | {"results"}
    uploads = {one.name.split("/")[1] for one in listed if one.name.startswith("up/")}
    assert uploads == {"phi", "V", "C"}
    assert all(one.meaning for one in listed if one.name.startswith("up/"))
    named = what_is_sent(1, {"dataset": {"name": "digits"}, "device": "cpu"}, "local")
    assert not [one for one in named if one.name.startswith("up/")]
    with pytest.raises(UserError, match="Unknown method 'gfpl'; did you mean 'gpfl'"):
        what_is_sent(0, local, "gfpl")
