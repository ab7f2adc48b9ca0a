"""The command `fedloom audit`: attacks on what clients upload, and on their models."""

from __future__ import annotations

import json as json_module
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli import completion
from fedloom.cli.command import examples
from fedloom.cli.console import begin, err, out
from fedloom.cli.options import ConfigDict, Json, option, with_settings
from fedloom.cli.tables import Column, number_column, print_table
from fedloom.core.errors import UserError, plural

if TYPE_CHECKING:
    from fedloom.studies.audit import Audit, AuditOptions

GROUP = "Evaluation"
FAILED = (
    "An attack that fails shows that this attack fails, not that anything is private. Only noise with a small epsilon "
    "bounds what any attack can find."
)
COLUMNS = [
    Column("method", wanted=12),
    number_column("noise"),
    number_column("epsilon"),
    number_column("score"),  # which is called what it is
    Column("attacked", optional=True),
    number_column("round: ref. PSNR", optional=True),
    number_column("round: PSNR"),
    number_column("round: SSIM"),
    number_column("one step: PSNR"),
    number_column("one step: recovered"),
    number_column("membership: AUC"),
    number_column("membership: advantage", optional=True),
]


@with_settings()
def audit(
    config: ConfigDict,
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            help="methods to train and attack, or the folder of a finished run [fedavg]",
            metavar="METHOD...|RUN",
            show_default=False,
            autocompletion=lambda: completion.names("algorithms"),
        ),
    ] = None,
    attacks: Annotated[
        str | None,
        option("--attacks", about="round,step,membership, or some of them [all]", metavar="NAME,...", group=GROUP),
    ] = None,
    gap: Annotated[
        int | None,
        option("--gap", about="rounds between those that are attacked [first and last]", metavar="INT", group=GROUP),
    ] = None,
    victims: Annotated[
        str, option("--victims", about="clients that are attacked in each of them [4]", metavar="INT|all", group=GROUP)
    ] = "4",
    batches: Annotated[
        int, option("--batches", about="of each client, to recover from a round [2]", metavar="INT", group=GROUP)
    ] = 2,
    samples: Annotated[
        int, option("--samples", about="of each client, to recover from one step [1]", metavar="INT", group=GROUP)
    ] = 1,
    iterations: Annotated[
        int, option("--iterations", about="of the reconstructions [100]", metavar="INT", group=GROUP)
    ] = 100,
    every_part: Annotated[
        bool,
        option("--every-part", about="also attack parts of an upload, such as the body alone", group=GROUP),
    ] = False,
    dp_clip: Annotated[
        float | None,
        option("--dp-clip", about="clip updates to this norm, and add noise", metavar="FLOAT", group="Training"),
    ] = None,
    dp_noise: Annotated[
        str | None,
        option(
            "--dp-noise",
            about="noise in units of --dp-clip, or several to compare",
            metavar="FLOAT,...",
            group="Training",
        ),
    ] = None,
    out_: Annotated[
        Path | None, option("--out", about="folder for tables and pictures", metavar="FOLDER", group="Results")
    ] = None,
    json: Json = False,
    verbose: Annotated[bool, option("--verbose", "-v", about="log the execution plan and the kernels used")] = False,
) -> None:
    """Attack what clients upload, and their models.

    Three attacks: samples are reconstructed from the upload of a round, and from the upload after one step; and samples
    that a model was trained on are told from others (membership inference).
    """
    from fedloom.cli import display
    from fedloom.studies.audit import ATTACKS, AuditOptions, audit_methods, audit_run, finished_run
    from fedloom.studies.costs import configurations

    begin(verbose)
    options = AuditOptions(
        attacks=tuple(word.strip() for word in attacks.split(",")) if attacks is not None else ATTACKS,
        gap=gap, victims=_victims(victims), batches=batches, samples=samples, iterations=iterations,
        every_part=every_part,
    )  # fmt: skip
    options.check()
    config = config | ({"dp_clip": dp_clip} if dp_clip is not None else {})
    names = methods or ([] if {"methods", "algorithm"} & config.keys() else ["fedavg"])
    result = finished_run(names[0]) if len(names) == 1 else None
    with display.round_progress(err) as callbacks:
        say = (lambda text: err.print(text, style="dim", highlight=False)) if err.is_terminal else None
        if result is not None:
            if given := [*config, *(["dp_noise"] if dp_noise else [])]:
                raise UserError(f"A finished run has its settings; leave out {given[0]}, or name a method instead.")
            found = audit_run(result, options, callbacks, say)
        else:
            found = audit_methods(configurations(names or None, config), options, _noises(dp_noise), callbacks, say)
    paths = found.save(out_) if out_ is not None else []
    if json:
        out.out(json_module.dumps(found.to_json()), highlight=False)
        return
    _print(found, options)
    for path in paths:
        out.print(str(path), highlight=False, soft_wrap=True)
    if not paths:
        out.print("--out FOLDER writes tables of all attacks, and pictures of what they recover.", highlight=False)


def _victims(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal():
        raise UserError(f"victims must be a whole number of at least 1, or all, not '{text}'.")
    return int(text)


def _noises(text: str | None) -> list[float]:
    try:
        return [float(word) for word in text.split(",")] if text is not None else []
    except ValueError:
        raise UserError(f"dp_noise must be numbers above 0, such as 0.5,1,2, not '{text}'.") from None


def _print(found: Audit, options: AuditOptions) -> None:
    rows = found.summary
    cells = [_cells(row, options.every_part) for row in rows]
    columns = [place for place in range(len(COLUMNS)) if place == 0 or any(row[place] for row in cells)]
    shown = [[row[place] for place in columns] for row in cells]
    titles = [c._replace(title=rows[0]["metric"]) if c.title == "score" else c for c in COLUMNS]
    print_table(out, [titles[place] for place in columns], shown)
    for sentence in _sentences(rows, options):
        out.print(sentence, highlight=False)


def _cells(row: dict[str, Any], every_part: bool) -> list[str]:
    """The cells of a row; of several parts of an upload, each is named with the method."""
    recovered = row["step_recovered"]
    cases = row["step_batches"] - row["step_failed"]
    return [
        f"{row['method']} ({row['part']})" if every_part and row["part"] else row["method"],
        _number(row["dp_noise"], ""),
        _number(row["epsilon"], ".3g" if row["epsilon"] and row["epsilon"] >= 1000 else ".1f"),
        _number(row["score"], ".1f"),
        "" if every_part else row["part"],
        _number(row["round_psnr_ref"], ".2f"),
        _number(row["round_psnr"], ".2f"),
        _number(row["round_ssim"], ".2f"),
        _number(row["step_psnr"], ".1f"),
        "" if not cases else f"{100 * recovered:.0f} %",
        "" if math.isnan(row["membership_auc"]) else f"{row['membership_auc']:.3f} ± {row['membership_se']:.3f}",
        _number(row["membership_advantage"], ".3f"),
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else f"{value:{form}}"


def _sentences(rows: list[dict[str, Any]], options: AuditOptions) -> list[str]:
    """What the table says, and what it does not."""
    from fedloom.attacks.scores import RECOVERED

    said = []
    guesses = [row[name] for row in rows for name in ("round_guess", "step_guess") if not math.isnan(row[name])]
    if guesses:
        said.append(
            f"PSNR in decibels, more is worse for the client: guessing the mean sample has {min(guesses):.1f}; "
            f"from {RECOVERED:.0f} on, a sample counts as recovered."
        )
    if "membership" in options.attacks:
        said.append("Membership: AUC 0.5 and advantage 0 are a coin toss, 1 is certainty.")
    for method, why in dict.fromkeys((row["method"], row["why_not"]) for row in rows):
        if why and {"round", "step"} & set(options.attacks):
            said.append(f"{method}: no reconstruction, because {why}.")
    if lost := sum(row["round_failed"] for row in rows):
        said.append(
            f"{plural(lost, 'reconstruction')} from rounds ended in NaN and {'is' if lost == 1 else 'are'} left out."
        )
    return [*said, FAILED]


COMMANDS: dict[Callable[..., None], str] = {
    audit: examples(
        "fedloom audit fedavg fedrep gpfl --rounds 10 --clients 10",
        "fedloom audit runs/ditto-digits-1 --attacks membership",
        "fedloom audit fedavg --dp-clip 1 --dp-noise 0.1,1,10 --out runs/audit",
        docs="docs/audit.md, docs/privacy.md",
    ),
}
