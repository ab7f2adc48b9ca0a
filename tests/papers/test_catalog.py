"""The papers' experiments: every one can be configured, and every number of a table belongs to one of its cells."""

import itertools

import pytest
from sentences import user_error

from fedloom.cli.figures import FIGURES
from fedloom.config.files import preset
from fedloom.papers.catalog import experiments, find_experiment, runnable
from fedloom.papers.numbers import _numbers, find_number
from fedloom.studies.cost_metrics import COST_METRICS
from fedloom.studies.protocols import find_protocol
from fedloom.studies.reproduce import configuration, select

RUNNABLE = [one for one in experiments().values() if not one.commands]
NOT_MEASURED = {"psnr_db", "gain_pp"}  # of an attack, and what a paper says against its own tables


@pytest.mark.parametrize("experiment", RUNNABLE, ids=lambda one: one.id)
def test_all_cells_can_be_configured(experiment):
    """One cell of every row and of every column, with the rounds that the paper trains."""
    first_task, first_method = experiment.tasks[0], experiment.methods[0]
    cells = [(task, first_method) for task in experiment.tasks]
    cells += [(first_task, method) for method in experiment.methods]
    for task, method in cells:
        config = configuration(task, method, {})
        assert config.settings.rounds >= 100
        assert config.settings.keep == "none"
    for how in experiment.metrics.values():
        assert (COST_METRICS[how] if experiment.costs else find_protocol(how)).about


@pytest.mark.parametrize("experiment", [one for one in experiments().values() if one.commands], ids=lambda one: one.id)
def test_what_is_no_table_is_made_by_commands(experiment):
    """Names of experiments, tasks, rows, figures and presets in the commands are known, and a figure is drawn of a
    folder that the command before it writes."""
    folders = set()
    for command in experiment.commands:
        program, name, *words = command.split()
        assert (program, name) in {("fedloom", known) for known in ("reproduce", "compare", "plot", "audit")}
        options = dict(itertools.pairwise(words))
        if name == "reproduce":
            selection = select(runnable(words[0]), [options["--task"]], None, options.get("--algorithms", "").split())
            folders |= {f"{options.get('--out', 'runs/' + words[0])}/{task.name}" for task in selection.tasks}
        elif name == "plot":
            assert words[0] in FIGURES
            assert words[1] in folders
        else:
            assert preset(options["--preset"])["dataset"]
            folders.add(options.get("--out", ""))


def test_every_number_that_can_be_measured_is_in_a_cell():
    reached = set()
    for one in RUNNABLE:
        for task in one.tasks:
            for method in one.methods:
                if method.algorithm is not None:
                    setting = task.setting | method.setting
                    reached |= {
                        (one.paper, one.table, task.dataset, setting, method.algorithm, metric)
                        for metric in one.metrics
                    }
            gains = f"{one.paper}_vs_worst_baseline"
            reached |= {(one.paper, one.table, task.dataset, task.setting, gains, m) for m in one.improvement.values()}
    missing = [key for key in _numbers() if key not in reached and key[-1] not in NOT_MEASURED]
    assert missing == []
    assert len(reached & _numbers().keys()) > 1500


def test_numbers_of_the_papers():
    """Three cells, looked up in the papers."""
    gpfl = find_number("GPFL", "T1", "FMNIST", ["N=20", "dirichlet", "beta=0.1", "backbone=CNN4"], "GPFL", "acc_best")
    assert (gpfl.value, gpfl.std, gpfl.unusable) == (97.81, 0.09, "")
    lowest = find_number("PLGU", "T2", "CIFAR10", ["C=10", "labels=3", "model=personal"], "PLGU-GRep", "acc_low5")
    assert (lowest.value, lowest.std) == (69.98, None)
    page = find_experiment("page-t1")
    task = next(task for task in page.tasks if task.name == "synthetic")
    by_label = {method.label: method for method in page.methods}
    assert page.number(task, by_label["PAGE"], "acc_local").value == 96.24
    assert page.number(task, by_label["PAGE (clients only)"], "acc_local") is None


def test_contradictory_numbers_are_marked():
    """The mean of pFedMe with all clients and 8 labels, 73.04, is above the mean of its top 5 %, 72.41."""
    cell = ("PLGU", "T9", "CIFAR10", ["C=100", "labels=8", "model=personal"], "pFedMe", "acc_top5")
    assert find_number(*cell).unusable
    assert sum(bool(number.unusable) for number in _numbers().values()) > 40


def test_what_does_not_exist_is_named():
    with user_error("'table 7'", "lists all"):
        find_experiment("table 7")
    with user_error("did you mean 'gpfl-beta'"):
        find_experiment("GPFL-bta")
    with user_error("GPFL-T5 is no table", "fedloom audit"):
        runnable("GPFL-T5")
    with user_error("task of GPFL-T1 'fmnist'", "fmnist-"):
        select(find_experiment("GPFL-T1"), tasks=["fmnist"])
    with user_error("data set of GPFL-T1 'fminst'", "fmnist"):
        select(find_experiment("GPFL-T1"), dataset="fminst")
    with user_error("method of GPFL-T1 'fedrp'", "fedrep"):
        select(find_experiment("GPFL-T1"), algorithms=["fedrp"])


@pytest.mark.parametrize("experiment", RUNNABLE, ids=lambda one: one.id)
def test_every_row_can_be_chosen_on_the_command_line(experiment):
    """Where commas separate rows."""
    for row in experiment.methods:
        assert row in select(experiment, algorithms=row.label.split(",")).methods


def test_rows_are_found_by_label_and_by_method():
    page = find_experiment("PAGE-T1")
    assert [row.label for row in select(page, algorithms=["page", "fedavg"]).methods] == ["PAGE", "FedAvg"]
    plgu = select(find_experiment("PLGU-T3"), algorithms=["plgu-lf"])
    assert [row.label for row in plgu.methods] == ["PLGU-LF (global)", "PLGU-LF (personal)"]
