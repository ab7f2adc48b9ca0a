"""Config dicts are combined, read from files and checked; a configuration that is described resolves to itself."""

import json
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from helpers import make_federation, methods, run_cli
from owndata import csv, rows, write
from sentences import user_error
from torch import nn

from fedloom.algorithms.ditto import Ditto
from fedloom.algorithms.fedavg import FedAvg
from fedloom.config.files import FORMAT, LARGEST, SECTIONS, parse_config, preset, presets, read_config, to_yaml
from fedloom.config.resolve import combine, configure, describe, difference, resolve
from fedloom.config.settings import Settings
from fedloom.core.algorithm import ALGORITHMS
from fedloom.core.settings import fields
from fedloom.data.dataset import DATASETS
from fedloom.data.partitions import PARTITIONS
from fedloom.models.zoo import MODELS

REGISTRIES = {"algorithm": ALGORITHMS, "dataset": DATASETS, "partition": PARTITIONS, "model": MODELS}


def choices():
    """Section, name and class of every method, data set, partition and model."""
    for section, registry in REGISTRIES.items():
        for name in registry.names():
            if registry[name].__module__.startswith("fedloom.") and name != "own":  # which needs files: test_own.py
                yield section, name, registry[name]


def other_value(cls, name):
    """A value of a setting that is not its default."""
    default, hint = fields(cls)[name].default, typing.get_type_hints(cls)[name]
    options = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return next(o for o in options if o != default)
    if default is None:  # a number, a word or none
        return "cpu" if str in options else 3 if int in options else 0.125
    if isinstance(default, tuple):
        return (0.5, 0.125, 0.375)[: len(default)] if isinstance(default[0], float) else (7, 5)
    if isinstance(default, bool):
        return not default
    limits = fields(cls)[name].metadata
    least = limits.get("above") or limits.get("low") or 0
    return {int: max(7, least), float: least + 0.125, str: "cpu"}[type(default)]


def assert_survives(config_dict, section, name, value):
    """A configuration with this setting is the same after it was described, and after it went through a file."""
    config = resolve(config_dict)
    owner = config.settings if section == "run" else getattr(config, section)
    assert getattr(owner, name) == value != fields(type(owner))[name].default, (section, name)
    described = describe(config)
    assert resolve(described) == config, (section, name)
    assert resolve(parse_config(to_yaml(described), "a file")) == config, (section, name)


def test_there_is_something_of_every_kind_to_choose_from():
    found = [(section, name) for section, name, _ in choices()]
    assert {section for section, _ in found} == set(SECTIONS)
    assert ("algorithm", "ditto") in found
    assert [name for section, name in found if section == "algorithm"] == methods()


@pytest.mark.parametrize(
    ("section", "thing", "name", "value"),
    [
        ("run", "", "lr", 0.125),
        ("run", "", "split", (0.5, 0.125, 0.375)),
        ("run", "", "clip", 2.5),  # a number or none
        ("algorithm", "fedrep", "average", "clients"),  # one of several words
        ("algorithm", "mapper", "lambdas", (0.5, 0.125)),
        ("dataset", "synthetic", "iid_x", True),
        ("partition", "kclass_ratio", "k", 3),
        ("model", "mlp", "width", 7),
    ],
)
def test_a_setting_survives_description_and_file(section, thing, name, value):
    config_dict = {name: value} if section == "run" else {section: {"name": thing, name: value}}
    assert_survives(config_dict, section, name, value)


def test_every_choice_and_every_setting_survive_description_and_file():
    """All methods, data sets, partitions and models with their defaults, and each setting at another value."""
    for name in fields(Settings):
        assert_survives({name: other_value(Settings, name)}, "run", name, other_value(Settings, name))
    for section, thing, cls in choices():
        config = configure(**{section: thing})
        assert getattr(config, section).name == thing
        assert resolve(describe(config)) == config, thing
        for name in fields(cls):
            value = other_value(cls, name)
            assert_survives({section: {"name": thing, name: value}}, section, name, value)


def test_many_settings_at_once_survive_description_and_file(tmp_path):
    config = resolve(
        {
            "algorithm": {"name": "fedrep", "head_epochs": 3, "average": "clients"},
            "dataset": {"name": "synthetic", "variant": "fedprox", "beta": 0.5, "iid_x": True},
            "partition": {"name": "kclass_ratio", "k": 3, "low": 0.1, "high": 1e-7},
            "model": {"name": "mlp", "width": 17},
            "lr": "1e-5",
            "clip": 2.5,
            "split": "0.6/0.2/0.2",
            "seed": 2**62 + 1,
            "device": "cuda:0",
            "data_dir": str(tmp_path / "späte Daten"),
        }
    )
    assert (config.settings.lr, config.settings.seed, config.partition.high) == (1e-5, 2**62 + 1, 1e-7)
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(describe(config)), encoding="utf-8")
    assert resolve(read_config(file)) == config
    assert config.data_dir == tmp_path / "späte Daten"


def test_defaults_of_the_data_set_are_described_too():
    """Otherwise a file would mean something else when the defaults change."""
    described = describe(configure("fedavg", "fmnist"))
    assert (described["lr"], described["rounds"], described["model"]["name"]) == (0.005, 100, "cnn4")


@pytest.mark.parametrize(
    ("name", "found"), [("har", 30), ("amazon", 4), ("mnist-by-writer", 539), ("femnist", 20), ("own", 3)]
)
def test_clients_are_as_many_as_the_data_set_has(tmp_path, name, found):
    dataset = str(write(tmp_path / "data.csv", csv(rows()))) if name == "own" else name
    assert describe(configure("fedavg", dataset))["clients"] == found
    assert configure("fedavg", dataset, values={"clients": str(found)}).settings.clients == found
    assert configure("fedavg", dataset, "iid", values={"clients": 5}).settings.clients == 5
    title = "data.csv" if name == "own" else f"Data set '{name}'"
    with user_error(f"{title} has {found} clients, not 1; set ", "subset=1" if name != "femnist" else "writers=1"):
        configure("fedavg", dataset, values={"clients": 1})
    with user_error(f"{title} has {found} clients, not 999; set ", "iid" if name != "femnist" else "writers=999"):
        resolve({"dataset": dataset, "partition": "natural", "clients": 999})


def test_clients_of_a_federation_are_its_own():
    data = make_federation((3, 4))
    assert describe(configure("fedavg", data))["clients"] == 2
    with user_error("The federation has 2 clients, not 5; set clients=2."):
        configure("fedavg", data, values={"clients": 5})


def test_clients_are_as_asked_for_where_the_data_set_leaves_it_open():
    for name in ("synthetic", "shakespeare", "stackexchange", "stackoverflow"):
        assert configure("fedavg", name, values={"clients": 7}).settings.clients == 7
    assert configure("fedavg", "femnist", values={"writers": 50, "clients": 50}).settings.clients == 50


@pytest.mark.parametrize("clients", [5, 20])
def test_what_older_formats_say_of_clients_that_the_data_fix_is_not_believed(clients):
    """They recorded 20, the default, or what a user asked for in vain."""
    new = describe(configure("fedavg", "har"))
    text = to_yaml({**new, "clients": clients})
    old = parse_config(text.replace(f"format: {FORMAT}", "format: 1"), "a file")
    assert difference(old, new) is None
    assert describe(resolve(old)) == new
    with user_error("has 30 clients"):
        resolve(parse_config(text, "a file"))
    digits = to_yaml(describe(configure(values={"clients": clients}))).replace(f"format: {FORMAT}", "format: 1")
    assert parse_config(digits, "a file")["clients"] == clients


def test_a_folder_of_data_is_described_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert describe(configure(data_dir="sets"))["data_dir"] == str(tmp_path / "sets")
    assert describe(configure())["data_dir"] is None


def test_objects_given_in_python_are_described_as_such():
    described = describe(configure(Ditto(lam=0.5), make_federation((3, 4)), model=nn.Linear(6, 4), head="weights"))
    assert described["algorithm"] == {"name": "ditto", "lam": 0.5, "personal_epochs": 1}
    assert described["dataset"] == {"name": "Federation", "own": True}
    assert described["model"] == {"name": "Linear", "own": True}
    assert described["head"] == "weights"
    assert json.dumps(described)  # plain data, whatever was given


def test_a_seed_changes_nothing_else():
    config = configure("ditto", values={"lam": 0.5, "lr": 0.2})
    assert difference(describe(config), describe(config.with_seed(9))) == ("seed", 0, 9)
    assert config.with_seed(9).with_seed(0) == config


def test_later_config_dicts_override_earlier_ones():
    preset_, file, options = {"lr": 1, "rounds": 1, "clients": 1}, {"lr": 2, "rounds": 2}, {"lr": 3}
    assert combine(preset_, file, options) == {"lr": 3, "rounds": 2, "clients": 1}


def test_combining_does_not_change_the_config_dicts():
    below = {"algorithm": {"name": "ditto", "lam": 1}}
    combine(below, {"algorithm": {"lam": 2}, "algorithm.personal_epochs": 3})
    assert below == {"algorithm": {"name": "ditto", "lam": 1}}


@pytest.mark.parametrize(
    "later",
    [{"algorithm": "fedprox"}, {"algorithm": {"name": "fedprox"}}, {"algorithm.name": "fedprox"}],
    ids=["word", "section", "dotted"],
)
def test_replacing_the_method_drops_the_settings_of_the_old_one(later):
    below = {"algorithm": {"name": "ditto", "lam": 0.5}, "lr": 0.2}
    assert combine(below, later) == {"algorithm": {"name": "fedprox"}, "lr": 0.2}
    config = resolve(combine(below, later, {"algorithm.mu": 0.7}))
    assert (config.algorithm.name, config.algorithm.mu) == ("fedprox", 0.7)


def test_settings_of_a_method_that_is_named_again_stay():
    below = {"algorithm": {"name": "ditto", "lam": 0.5, "personal_epochs": 2}}
    above = {"algorithm": {"name": "ditto", "lam": 0.7}}
    assert combine(below, above) == {"algorithm": {"name": "ditto", "lam": 0.7, "personal_epochs": 2}}
    assert combine(below, {"algorithm": "ditto"}) == below


def test_replacing_one_section_leaves_the_others():
    below = {"partition": {"name": "pathological", "k": 3}, "model": {"name": "mlp", "width": 9}}
    assert combine(below, {"partition": "iid"}) == {"partition": {"name": "iid"}, "model": {"name": "mlp", "width": 9}}


@pytest.mark.parametrize("key", ["algorithm.lam", "lam"])
def test_a_dotted_key_and_a_bare_one_mean_the_same_setting(key):
    assert resolve({"algorithm": "ditto", key: 0.7}).algorithm.lam == 0.7
    assert resolve(combine({"algorithm": {"name": "ditto", "lam": 0.5}}, {key: 0.7})).algorithm.lam == 0.7


def test_a_bare_key_overrides_that_of_the_section():
    """The preset says `partition: {name: dirichlet_class, beta: 0.1}`, the user `--set beta=0.5`."""
    config = resolve(combine(preset("gpfl/fmnist-dirichlet"), {"beta": "0.5"}))
    assert config.partition.beta == 0.5


def test_a_dotted_key_of_an_option_overrides_a_bare_one_of_a_file():
    """However it is written, an option overrides a file."""
    assert resolve(combine({"lam": 1.0}, {"algorithm.lam": 0.5})).algorithm.lam == 0.5
    assert resolve(combine({"lam": 1.0}, {"algorithm": {"name": "ditto", "lam": 0.5}})).algorithm.lam == 0.5


def test_the_command_line_puts_options_over_the_file_over_the_preset(tmp_path, monkeypatch, capsys):
    """The data set is the preset's, the samples per client (of which the server gets a fifth) are the file's, and the
    number of clients is the option's."""
    file = tmp_path / "mine.yaml"
    file.write_text("clients: 7\ndataset: {per_client: 50}\nsplit: [0.5, 0.25, 0.25]\n")
    args = ["data", "show", "--preset", "page/synthetic", "--config", str(file), "--clients", "4", "--json"]
    code, out, _ = run_cli(monkeypatch, capsys, *args)
    assert code == 0
    found = json.loads(out)
    assert [(c["samples"], c["train"], c["val"], c["test"]) for c in found["clients"]] == [(40, 20, 10, 10)] * 4
    assert (found["server"], found["classes"]) == (40, 30)


@pytest.mark.parametrize(
    ("config_dict", "words"),
    [
        (
            {"algorithm": "fedavg", "lam": 1},
            ["'lam'", "belongs to the methods ditto,", "and pfedme, not to the method fedavg", "ditto:lam=VALUE"],
        ),
        ({"algorithm": "fedavg", "algorithm.mu": 1}, ["'algorithm.mu'", "belongs to the method", "not to the method"]),
        ({"model": "mlp", "dropout_rate": 1}, ["'dropout_rate'"]),
        ({"partition": "iid", "beta": 1}, ["'beta'", "belongs to the", "or the partition iid"]),
        ({"zzzzz": 1}, ["'zzzzz'", "fedloom list settings", "fedloom list algorithms NAME"]),
    ],
)
def test_a_setting_of_something_else_says_whose_it_is(config_dict, words):
    with user_error(*words):
        resolve(config_dict)


def test_a_setting_of_an_object_is_set_there():
    with user_error("'lam'", "the method ditto is given as an object", "Ditto(...)"):
        configure(Ditto(), values={"lam": 3})


@pytest.mark.parametrize(
    ("config_dict", "words"),
    [
        ({"algorithm": "dito"}, ["'dito'", "did you mean 'ditto'?"]),
        ({"algorithm": {"name": "ditto", "lamb": 1}}, ["algorithm 'ditto'", "'lamb'", "did you mean 'lam'?"]),
        ({"algorithm": {"name": 3}}, ["algorithm must be a word", "'3'"]),
        ({"algorithm": {"name": ["ditto", "local"]}}, ["algorithm must be a word"]),
        ({"data_dir": 3}, ["data_dir must be a word", "'3'"]),
        ({"head": 3}, ["head must be a word", "'3'"]),
        ({"roundz": 3}, ["'roundz'", "did you mean 'rounds'?"]),
        ({"rounds": [3]}, ["rounds", "whole number"]),
        ({"rounds": None}, ["rounds", "has no value"]),
        ({"modle.width": 3}, ["'modle.width'", "did you mean 'model'?"]),
        ({"run.lr": 3}, ["'run.lr'", "does not name a section"]),
        ({"algorithm.lam.x": 3}, ["'algorithm.lam.x'", "does not name a section"]),
        ({"model": {"name": "Linear", "own": True}}, ["model 'Linear'", "made in Python"]),
        ({"algorithm": {"own": 3}}, ["algorithm 'ditto'", "'own'"]),
    ],
)
def test_a_mistake_in_a_config_dict_gets_one_sentence(config_dict, words):
    with user_error(*words):
        resolve(config_dict)


def test_a_file_that_is_not_there(tmp_path):
    with user_error(str(tmp_path / "mine.yaml"), "no such file"):
        read_config(tmp_path / "mine.yaml")


def test_what_is_not_a_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with user_error(str(path), "is not a file", "lr: 0.1"):
            read_config(path)


def test_a_pipe_that_the_shell_has_opened_is_read():
    script = "import sys; from pathlib import Path; from fedloom.config.files import read_config; "
    script += "print(read_config(Path(sys.argv[1])))"
    for path in ("/dev/stdin", "/dev/fd/0"):
        command = [sys.executable, "-c", script, path]
        assert subprocess.run(command, input=b"lr: 0.5", stdout=subprocess.PIPE).stdout == b"{'lr': 0.5}\n"
        long = subprocess.run(command, input=b"#" * (LARGEST + 1), capture_output=True)
        assert b"is too large for a configuration" in long.stderr


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x88\x00\xff\xfe")
    with user_error(str(path), "not a text file"):
        read_config(path)


NOT_CONFIG_DICTS = {
    "broken": ("lr: 0.1\nrounds: 3\nsplit: [0.7, 0.1\nclients: 4\n", ["not valid YAML", "line 4"]),
    "a tab": ("lr: 0.1\n\trounds: 3\n", ["not valid YAML", "line 2"]),
    "two colons": ("lr: 0.1\nrounds: 3: 4\n", ["not valid YAML", "line 2"]),
    "two documents": ("lr: 0.1\n---\nlr: 0.2\n", ["not valid YAML", "line 2"]),
    "no text": ("lr: \x00", ["not valid YAML"]),
    "a list": ("- lr\n- rounds\n", ["a list", "lr: 0.1"]),
    "a word": ("ditto\n", ["a word"]),
    "a number": ("3\n", ["'3'"]),
    "true": ("true\n", ["true or false"]),
    "a number as a name": ("lr: 0.1\n3: 4\n", ["'3'", "name of a setting"]),
    "yes as a name": ("yes: 4\n", ["'True'", "name of a setting"]),
    "nothing as a name": ("null: 4\n", ["'None'", "name of a setting"]),
    "an unknown section": ("algoritm:\n  lam: 0.5\n", ["'algoritm'", "did you mean 'algorithm'?"]),
    "settings below a setting": ("lr:\n  ditto: 0.5\n", ["'lr'", "algorithm, dataset, model, partition"]),
    "a section as a list": ("algorithm: [ditto, fedavg]\n", ["algorithm", "a list"]),
    "a section as a number": ("model: 3\n", ["model", "'3'"]),
    "a section as a switch": ("partition: no\n", ["partition", "true or false"]),
    "an empty section": ("dataset:\nlr: 0.1\n", ["dataset"]),
    "a newer header": (f"fedloom: {{version: 9.0.0, format: {FORMAT + 1}}}\nlr: 0.1\n", ["newer", "update FedLoom"]),
}


@pytest.mark.parametrize("mistake", NOT_CONFIG_DICTS)
def test_a_file_that_is_no_config_dict_gets_one_sentence_with_its_name(mistake, tmp_path):
    text, words = NOT_CONFIG_DICTS[mistake]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with user_error(str(path), *words):
        read_config(path)


@pytest.mark.parametrize("text", ["", "\n", "# nothing yet\n", "---\n"])
def test_an_empty_file_is_an_empty_config_dict(text):
    assert parse_config(text, "a file") == {}


@pytest.mark.parametrize("header", [f"{{version: 0.0.1, format: {FORMAT}}}", "{}", "3"])
def test_the_header_of_this_format_or_none_is_no_setting(header):
    assert parse_config(f"fedloom: {header}\nlr: 0.1\n", "a file") == {"lr": 0.1}


def test_numbers_may_be_written_as_people_do():
    """YAML reads 1e-3 as a word."""
    config = resolve(parse_config("lr: 1e-3\nclip: none\nsplit: 0.5/0.2/0.3\nrounds: 1e2\n", "a file"))
    s = config.settings
    assert (s.lr, s.clip, s.split, s.rounds) == (0.001, None, (0.5, 0.2, 0.3), 100)


def test_a_file_says_which_format_it_has():
    text = to_yaml(describe(configure()))
    assert text.startswith("fedloom:\n")
    assert f"format: {FORMAT}" in text


def test_equal_configurations_do_not_differ():
    described = describe(configure("ditto"))
    assert difference(described, described) is None
    assert difference(described, parse_config(to_yaml(described), "a file")) is None


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"lr": 0.2}, ("lr", 0.05, 0.2)),
        ({"lam": 0.5}, ("algorithm.lam", 0.1, 0.5)),
        ({"width": 8}, ("model.width", 64, 8)),
        ({"split": "0.5/0.2/0.3"}, ("split", [0.7, 0.1, 0.2], [0.5, 0.2, 0.3])),
        ({"clip": 2}, ("clip", None, 2.0)),
        ({"rounds": 3, "lam": 0.5}, ("algorithm.lam", 0.1, 0.5)),  # the first of two
    ],
)
def test_the_first_setting_that_differs_is_named_in_full_with_both_values(values, found):
    assert difference(describe(configure("ditto")), describe(configure("ditto", values=values))) == found


def test_another_method_differs_in_its_name():
    assert difference(describe(configure("ditto")), describe(configure("fedavg"))) == ("algorithm", "ditto", "fedavg")


def test_a_setting_that_only_one_configuration_has_is_a_difference():
    assert difference({"lr": 0.1}, {"lr": 0.1, "clip": 2.0}) == ("clip", None, 2.0)
    assert difference({"lr": 0.1, "clip": 2.0}, {"lr": 0.1}) == ("clip", 2.0, None)


def test_the_folder_of_the_data_is_no_difference(tmp_path):
    assert difference(describe(configure()), describe(configure(data_dir=tmp_path))) is None


def test_there_are_presets_of_the_papers():
    assert {"gpfl/fmnist-dirichlet", "gpfl/fmnist-pathological", "page/synthetic"} <= set(presets())


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_preset_resolves_to_what_it_says(name):
    config_dict = combine(preset(name))
    per_method = config_dict.pop("per_method", {})
    described = describe(resolve({**config_dict, "algorithm": "fedavg"}))
    for key, value in config_dict.items():
        if key in SECTIONS:
            assert value.items() <= described[key].items()
        else:
            assert described[key] == value
    for method, values in per_method.items():
        config = resolve(combine(preset(name), {"algorithm": method}))
        assert values.items() <= {**describe(config), **describe(config)["algorithm"]}.items()


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_preset_says_what_it_is_and_that_is_no_setting(name):
    about = presets()[name]["about"]
    assert about.endswith(".")
    assert "Table" in about or "he paper " in about  # whose it is, and how it differs
    assert "about" not in preset(name)


def test_an_unknown_preset_is_refused_with_the_nearest_one():
    with user_error("preset", "did you mean 'page/synthetic'?"):
        preset("page/syntetic")


def test_changing_a_preset_that_was_read_does_not_change_the_next_reading():
    preset("page/synthetic")["lr"] = 7
    assert preset("page/synthetic")["lr"] == 0.1


def test_a_key_that_stands_twice_is_a_mistake(tmp_path):
    (tmp_path / "x.yaml").write_text("lr: 1\nrounds: 3\nlr: 2\n")
    with user_error("x.yaml", "'lr' occurs twice"):
        read_config(tmp_path / "x.yaml")


def test_a_copy_of_a_preset_is_a_file_with_settings(tmp_path):
    (tmp_path / "x.yaml").write_text("about: mine\nlr: 0.5\n")
    assert read_config(tmp_path / "x.yaml") == {"lr": 0.5}


def test_a_method_must_have_a_name_of_its_own():
    class Mine(FedAvg):
        pass

    with user_error("Mine", "no name of its own"):
        configure(Mine)


LAYERED = {"lr": 0.1, "per_method": {"ditto": {"lam": 0.75, "lr": 0.01}, "fedprox": {"mu": 0.5}}}


def test_settings_for_a_method_count_where_it_runs():
    ditto, fedprox, fedavg = (resolve(combine(LAYERED, {"algorithm": name})) for name in ("ditto", "fedprox", "fedavg"))
    assert (ditto.algorithm.lam, ditto.settings.lr) == (0.75, 0.01)
    assert (fedprox.algorithm.mu, fedprox.settings.lr) == (0.5, 0.1)
    assert fedavg.settings.lr == 0.1


@pytest.mark.parametrize("later", [{"lr": 0.3, "lam": 0.2}, {"lr": 0.3, "algorithm": {"name": "ditto", "lam": 0.2}}])
def test_what_a_user_asks_for_overrides_settings_for_a_method(later):
    config = resolve(combine(LAYERED, {"algorithm": "ditto"}, later))
    assert (config.algorithm.lam, config.settings.lr) == (0.2, 0.3)
    assert LAYERED["per_method"]["ditto"] == {"lam": 0.75, "lr": 0.01}  # the preset itself is left alone


@pytest.mark.parametrize(("text", "words"), [("per_method: 3", "per_method"), ("per_method: {ditto: 3}", "'ditto'")])
def test_per_method_settings_that_are_no_settings_are_refused(text, words, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    with user_error("x.yaml", words):
        read_config(tmp_path / "x.yaml")


def test_a_variant_stands_for_several_settings_and_those_beside_it_count():
    code = resolve({"algorithm": {"name": "page"}, "algorithm.variant": "code"}).algorithm
    assert (code.client_signal, code.decode, code.server_reward) == ("test", "clip", "global")
    found = configure("page", values={"variant": "code", "decode": "affine"}).algorithm
    assert (found.client_signal, found.decode) == ("test", "affine")
    assert configure("gpfl", values={"variant": "paper"}).algorithm.pci_div_U
    assert "variant" not in describe(configure("gpfl", values={"variant": "paper"}))["algorithm"]


@pytest.mark.parametrize("name", [n for n in ALGORITHMS.names() if ALGORITHMS[n].variants])
def test_every_variant_differs_from_the_defaults(name):
    for variant, settings in ALGORITHMS[name].variants.items():
        found = configure(name, values={"algorithm.variant": variant}).algorithm
        assert found != ALGORITHMS[name]()
        assert {k: getattr(found, k) for k in settings} == settings


def test_variants_that_are_not_there_are_refused():
    with user_error("variant cannot be 'cod'", "did you mean 'code'?"):
        configure("gpfl", values={"variant": "cod"})
    with user_error("algorithm 'fedavg' has no variants"):
        configure("fedavg", values={"algorithm.variant": "code"})
    with user_error("setting of both", "algorithm.variant or dataset.variant"):
        configure("page", "synthetic", values={"variant": "code"})


def test_a_setting_that_was_not_there_when_a_run_was_started_had_its_default():
    old = describe(configure("fedavg"))
    del old["holdout_clients"]
    assert difference(old, describe(configure("fedavg"))) is None
    assert difference(old, describe(configure("fedavg", values={"holdout_clients": 3}))) == (
        "holdout_clients",
        0.0,
        3.0,
    )
