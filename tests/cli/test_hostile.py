"""Whatever a user, a file or the system does to the command line, it answers with one sentence and an exit code."""

import os
import signal
import subprocess
import sys

import pytest
from helpers import run_cli
from sentences import user_error

import fedloom
from fedloom.config.resolve import resolve
from fedloom.studies.study import parse_seeds

LONG = "x" * 300
SMALL = ("--rounds", "1", "--clients", "4", "--no-save")
RUN = ("run", *SMALL)
NOT_UTF8 = "The argument 'a\\udcff' is not valid UTF-8"
TOO_LONG = "cannot be used (file name too long)"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def assert_one_sentence(code, out, err, words):
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1, err
    assert words in err
    assert (code, out) == (2, "")


ARGUMENTS = {
    "per_method as a setting": ((*RUN, "--set", "per_method=1"), "must give per_method as methods with settings"),
    "per_method in a grid": (("sweep", *SMALL, "--grid", "per_method=1,2"), "'per_method' is none"),
    "data_dir in a grid": (("sweep", *SMALL, "--grid", "data_dir=a,b"), "'data_dir' is none"),
    "lr above float32": ((*RUN, "--lr", "1e39"), "lr must be at most 3.4e+38"),
    "lr below float32": ((*RUN, "--lr", "1e-50"), "lr must be 0 or at least 1.4e-45"),
    "lam above float32": ((*RUN, "--set", "lam=1e39"), "lam must be at most 3.4e+38"),
    "lr nan": ((*RUN, "--lr", "nan"), "lr must be a finite number"),
    "lr inf": ((*RUN, "--lr", "-inf"), "lr must be a finite number"),
    "lr of two lines": ((*RUN, "--lr", "1\n2"), r"lr must be a number, not '1\n2'"),
    "lr of 5000 letters": ((*RUN, "--lr", "x" * 5000), f"not '{'x' * 57}...'"),
    "batch size above int64": ((*RUN, "--batch-size", "9" * 20), "batch_size must be a whole number below 2^63"),
    "epochs above int64": ((*RUN, "--local-epochs", "9" * 300), "local_epochs must be a whole number below 2^63"),
    "epochs of 5000 digits": ((*RUN, "--local-epochs", "9" * 5000), "local_epochs must be a whole number"),
    "too many epochs": ((*RUN, "--local-epochs", str(10**9)), "local_epochs must be at most"),
    "too many rounds": (("run", "--no-save", "--rounds", str(10**18)), "rounds must be at most 1e+09, not 1e+18"),
    "seed above int64": ((*RUN, "--seed", str(2**63)), "seed must be a whole number below 2^63"),
    "a model above memory": ((*RUN, "--set", "width=1000000000"), "75000000010 parameters needs 1117.6 GiB"),
    "a model above all memory": ((*RUN, "--set", f"width={10**17}"), "too large for any memory; make it smaller"),
    "too many seeds": (("compare", *SMALL, "--seeds", "99999999999999"), "more than the 100000 that a study can have"),
    "seeds above all lists": (("compare", *SMALL, "--seeds", "9" * 30), "more than the 100000 that a study can have"),
    "seeds of 5000 digits": (("compare", *SMALL, "--seeds", "9" * 5000), "seeds must be how many"),
    "a seed above int64": (("compare", *SMALL, "--seeds", f"1,{2**63}"), "seeds must be how many"),
    "too many combinations": (
        ("sweep", *SMALL, *(f"--grid={name}={','.join(map(str, range(1, 101)))}" for name in ("lr", "lam", "clip"))),
        "1000000 runs are more than",
    ),
    "clients of digits": (("run", "--no-save", "--clients", "1000000000"), "more than the 1797 samples"),
    "clients of synthetic": (
        ("run", "--no-save", "--clients", "1000000000", "--dataset", "synthetic"),
        "3.75e+11 synthetic samples do not fit memory",
    ),
    "one huge client": ((*RUN, "--dataset", "synthetic", "--set", "theta=20"), "samples do not fit memory"),
    "clients of all sizes": ((*RUN, "--dataset", "synthetic", "--set", "theta=21"), "theta must be at most 20, not 21"),
    "inputs above float32": ((*RUN, "--dataset", "synthetic", "--set", "beta=1e38"), "beta must be at most 1e+06"),
    "models above float32": ((*RUN, "--dataset", "synthetic", "--set", "alpha=1e38"), "alpha must be at most 1e+06"),
    "clients of har": (
        ("run", "--rounds", "1", "--dataset", "har", "--clients", "5"),
        "Data set 'har' has 30 clients, not 5; set clients=30 and subset=5 to keep 5 of them.",
    ),
    "long --out": (("run", "--rounds", "1", "--out", LONG), TOO_LONG),
    "long --out of a comparison": (("compare", "fedavg", "--rounds", "1", "--out", LONG), TOO_LONG),
    "long --resume": (("run", "--resume", LONG), TOO_LONG),
    "long --resume of a comparison": (("compare", "--resume", LONG), TOO_LONG),
    "long --resume of a sweep": (("sweep", "--resume", LONG), TOO_LONG),
    "long --config": ((*RUN, "--config", LONG), "cannot be read (file name too long)"),
    "long --dataset": ((*RUN, "--dataset", LONG), "Unknown data set 'xxx"),
    "long --dataset with a suffix": ((*RUN, "--dataset", f"{LONG}.csv"), "xxx"),
    "long --data-dir": ((*RUN, "--dataset", "fmnist", "--data-dir", LONG), "was not found in"),
    "--config is a device": ((*RUN, "--config", "/dev/zero"), "/dev/zero is not a file"),
    "--out not UTF-8": ((*RUN, "--out", "a\udcff"), NOT_UTF8),
    "--resume not UTF-8": (("run", "--resume", "a\udcff"), NOT_UTF8),
    "--config not UTF-8": ((*RUN, "--config", "a\udcff"), NOT_UTF8),
    "--dataset not UTF-8": ((*RUN, "--dataset", "a\udcff"), NOT_UTF8),
    "--data-dir not UTF-8": ((*RUN, "--data-dir", "a\udcff"), NOT_UTF8),
    "--picture not UTF-8": (("data", "show", "--picture", "a\udcff"), NOT_UTF8),
    "a method not UTF-8": (("run", "a\udcff"), NOT_UTF8),
    "a path with NUL": ((*RUN, "--config", "a\0"), r"'a\x00' is not valid UTF-8"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_hostile_arguments_get_one_sentence(case, monkeypatch, capsys):
    args, words = ARGUMENTS[case]
    assert_one_sentence(*run_cli(monkeypatch, capsys, *args), words)
    assert os.listdir() == []


def test_a_picture_that_cannot_be_written_gets_one_sentence(monkeypatch, capsys):
    code, _, err = run_cli(monkeypatch, capsys, "data", "show", "--clients", "4", "--picture", f"{LONG}.png")
    assert_one_sentence(code, "", err, "file name too long")


LAUGHS = "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
FILES = {
    "per_method is a number": ("per_method: 1\n", "must give per_method as methods"),
    "per_method of a method is a number": ("per_method: {ditto: 1}\n", "settings below 'ditto' in per_method"),
    "a section in per_method is a number": ("per_method: {ditto: {model: 3}}\n", "must give model as a name or with"),
    "a method in per_method": ("per_method: {ditto: {algorithm: local}}\n", "names an algorithm below 'ditto'"),
    "per_method of an unknown method": ("per_method: {dito: {lam: 1}}\n", "did you mean 'ditto'?"),
    "a date": ("lr: 2020-01-01\n", "lr must be a number, not '2020-01-01'"),
    "an impossible date": ("lr: 2024-13-45\n", "lr must be a number, not '2024-13-45'"),
    "a tag": ("rounds: 1\nlr: !!timestamp hello\n", "line 2 has the tag '!!timestamp'"),
    "a tag of a switch": ("lr: !!bool hello\n", "line 1 has the tag '!!bool'"),
    "a tag of a set": ("split: !!set {a, b}\n", "line 1 has the tag '!!set'"),
    "a tag of Python": ("lr: !!python/object/apply:os.system [x]\n", "has the tag '!!python/object/apply:os.system'"),
    "a tag of nobody": ("lr: !mine 1\n", "has the tag '!mine'"),
    "a decimal number of 4000 digits": (f"rounds: {'9' * 4000}\n", "line 1 has the number 9999"),
    "a hexadecimal number of 4000 digits": (f"rounds: 0x{'f' * 4000}\n", "line 1 has the number 0xffff"),
    "900 digits as a name": (f"0x{'f' * 900}: 1\n", "line 1 has the number 0xffff"),
    "4000 digits and a point": (f"lr: {'9' * 4000}.0\n", "lr must be a finite number"),
    "4000 digits as text": (f"rounds: '{'9' * 4000}'\n", "rounds must be a whole number"),
    "billion laughs": (f"a: &a [x]\n{LAUGHS}lr: *i\n", "line 2 has the alias '*a'; write the value itself"),
    "a list in itself": ("lr: &a [*a]\n", "line 1 has the alias '*a'"),
    "30,000 keys": ("".join(f"k{i}: 1\n" for i in range(30_000)), "Unknown setting 'k0'"),
    "a key twice": ("lr: 1\nrounds: 2\nlr: 1\n", "'lr' occurs twice"),
    "octal": ("rounds: 1\nclients: 010\n", "line 2 has 010, and a leading zero means octal in YAML; write 10, or 8"),
    "no octal": ("rounds: 09\n", "line 1 has 09, and a leading zero means octal in YAML; write 9."),
    "sexagesimal": ("rounds: 1:30\n", "rounds must be a whole number, not '1:30'"),
    "a merge": ("<<: {rounds: 1}\n", "settings below '<<'"),
    "nothing": ("rounds:\n", "rounds has no value; give it one, or leave it out."),
    "nothing for a word": ("device:\n", "device has no value"),
    "nothing for a choice": ("dtype: ~\n", "dtype has no value"),
    "nothing for a list": ("split: null\n", "split has no value"),
    "nothing for a method's setting": ("algorithm: {lam: }\n", "lam has no value"),
    "5000 levels": (f"lr: {'[' * 5000}\n", "line 1 has more than 10 levels"),
    "5000 levels of lists": (f"{'- ' * 5000}\n", "line 1 has more than 10 levels"),
    "a NUL": ('data_dir: "a\\0b"\n', "line 1 has a character that is not text"),
    "a NUL in a path": ('rounds: 1\ndataset: "./a\\0b.csv"\n', "line 2 has a character that is not text"),
    "a lone surrogate": ('device: "\\ud800"\n', "line 1 has a character that is not text"),
    "nan": ("lr: .nan\n", "lr must be a finite number"),
    "a variant that is a list": ("algorithm: {name: fedavg, variant: [a]}\n", "has no variants"),
}


@pytest.mark.parametrize("case", FILES)
def test_hostile_files_get_one_sentence(case, tmp_path, monkeypatch, capsys):
    text, words = FILES[case]
    (tmp_path / "mine.yaml").write_text(text)
    assert_one_sentence(*run_cli(monkeypatch, capsys, "run", "--no-save", "--config", "mine.yaml"), words)


def test_a_file_of_100_mb_is_not_read(tmp_path, monkeypatch, capsys):
    with open(tmp_path / "mine.yaml", "wb") as file:
        file.truncate(100_000_000)
    result = run_cli(monkeypatch, capsys, *RUN, "--config", "mine.yaml")
    assert_one_sentence(*result, "mine.yaml is too large for a configuration: it has more than 1 MiB")


def test_hostile_values_from_python_get_one_sentence():
    with user_error("per_method"):
        fedloom.run(per_method=1)
    with user_error("must give per_method"):
        resolve({"per_method": 1})
    with user_error("rounds must be a whole number"):
        fedloom.run(rounds=16**4000)  # which Python does not write as text
    with user_error("seeds must be"):
        parse_seeds([16**4000])
    with user_error(r"'a\x00b' is not a path"):
        fedloom.run(out="a\0b")
    with user_error(r"'a\x00b' is not a path"):
        fedloom.compare(out="a\0b")
    with user_error(r"'a\ud800b' is not a path"):
        fedloom.run("fedavg", "har", data_dir="a\ud800b")


def program(*args, **options):
    """Runs `fedloom ARGS` in a process of its own, with one thread."""
    command = [sys.executable, "-m", "fedloom", *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, env=env, check=False, timeout=60, **options)


@pytest.mark.parametrize("args", [("--version",), (*RUN, "--engine", "reference")])
def test_output_to_a_full_device_gets_one_sentence(args):
    with open("/dev/full", "w") as full:
        done = program(*args, stdout=full)
    assert_one_sentence(done.returncode, "", done.stderr, "The output could not be written (no space left on device)")


def test_a_message_to_a_full_device_leaves_the_exit_code():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "fedloom", "runn"], stderr=full, check=False, timeout=60)
    assert done.returncode == 2


@pytest.mark.parametrize("args", [("--version",), ("run", "--help"), ("list", "models")])
def test_a_reader_that_has_gone_is_no_error_to_speak_of(args):
    reader, writer = os.pipe()
    os.close(reader)
    done = program(*args, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_output_may_be_closed():
    done = program("--version", stdout=None, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")


def test_output_that_cannot_encode_a_character_is_printed_all_the_same(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = program("list", "datasets", stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


def test_a_current_folder_that_was_removed_gets_one_sentence(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert_one_sentence(*run_cli(monkeypatch, capsys, *RUN), "The current folder has been removed")


INTERRUPTED = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
from fedloom.cli.main import main
sys.argv[0] = "fedloom"
main()
"""


@pytest.mark.parametrize("module", ["typer", "rich.console", "numpy", "torch", "torch.nn", "fedloom.engine.driver"])
def test_ctrl_c_during_imports_ends_the_program_in_order(module):
    """The signal comes when the module is about to be imported."""
    code = INTERRUPTED.replace("MODULE", repr(module))
    done = subprocess.run([sys.executable, "-c", code, *RUN], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_is_handled_as_before_when_a_command_has_ended(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT)
    run_cli(monkeypatch, capsys, "--version")
    assert signal.getsignal(signal.SIGINT) is before
