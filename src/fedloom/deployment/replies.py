"""What a site may answer: everything else is refused, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fedloom.core.errors import printable, shown
from fedloom.core.tree import Tree
from fedloom.deployment.kinds import FAILURE, REPLY
from fedloom.deployment.messages import BadMessage, Message, check_like
from fedloom.engine.clients import ClientRequest

COLUMNS = 3  # numbers of a score: correct predictions, summed loss, samples
WITH_METRIC = 4  # of scores on validation and test data, in a run with a metric of its own
LARGEST = 1e300  # of a finite number of a reply
MAX_TEXT = 500  # characters of a site's sentence that are repeated

SplitScores = dict[str, list[float]]  # of one client, by split


class JobResult(NamedTuple):
    """What came of one job of an order."""

    job: str
    scores: dict[str, SplitScores]  # by view: pre, post, global
    up: Tree = {}
    computed: tuple[float, float] = (0.0, 0.0)  # gradients, and samples of which they were taken


class Expected(NamedTuple):
    """What a reply must be."""

    run: str
    client: int
    t: int
    samples: int  # that the client has for training, or 1 if it need not say
    counted: dict[str, int]  # by split: most that can be scored, samples or positions in them
    upload: Tree  # an upload of the right structure, shapes and types
    has_metric: bool
    has_classes: bool  # so that the first number of a score is how many predictions are right


def checked(answer: Message | str, jobs: Sequence[ClientRequest], expected: Expected) -> list[JobResult | BadMessage]:
    """What came of each job of an order, or why it cannot be used; raises BadMessage for an answer that is no reply to
    the order."""
    if isinstance(answer, str):
        raise BadMessage(answer)
    if answer.kind == FAILURE:
        raise BadMessage(f"its site says: {said(answer)}")
    if answer.kind != REPLY:
        raise BadMessage("its answer is no reply")
    if (answer["run"], answer["client"], answer["t"]) != (expected.run, expected.client, expected.t):
        raise BadMessage("its reply is one to another order")
    results = answer["results"]
    if type(results) is not list or len(results) != len(jobs) or not all(type(one) is dict for one in results):
        raise BadMessage("its reply does not have the results that were asked for")
    if set(answer.trees) - {"up"}:
        raise BadMessage("its reply has more than an upload")
    found: list[JobResult | BadMessage] = []
    for one, job in zip(results, jobs, strict=True):
        try:
            found.append(_result(one, job, answer, expected))
        except BadMessage as error:
            found.append(error)
    return found


def _result(result: dict[str, Any], job: ClientRequest, answer: Message, expected: Expected) -> JobResult:
    if "why" in result:
        raise BadMessage(f"its site says: {text_of(result['why'])}")
    scores = _checked_scores(result.get("scores"), job, expected)
    if job.job == "evaluate":
        return JobResult(job.job, scores)
    check_like({"up": answer.trees.get("up", {})}, {"up": expected.upload})
    n = result.get("n")
    if n != expected.samples:
        raise BadMessage(f"it has {shown(n)} training samples, but it said {expected.samples} at the start of the run")
    computed: Any = result.get("computed")
    if type(computed) is not list or len(computed) != 2 or not all(map(_is_count, computed)):
        raise BadMessage("its reply does not say what it computed")
    return JobResult(job.job, scores, answer.trees.get("up", {}), (computed[0], computed[1]))


def views(job: ClientRequest) -> dict[str, tuple[str, ...]]:
    """The splits that are scored for a job, by view."""
    if job.job == "train":
        return {"post": job.splits}
    if job.global_params is None:
        return {"pre": job.splits}
    return {"global": job.global_splits, "pre": job.splits or job.global_splits}


def columns(split: str, has_metric: bool) -> int:
    """Numbers of a score."""
    return WITH_METRIC if has_metric and split in ("val", "test") else COLUMNS


def _checked_scores(scores: Any, job: ClientRequest, expected: Expected) -> dict[str, SplitScores]:
    wanted = views(job)
    if type(scores) is not dict or set(scores) != set(wanted):
        raise BadMessage("its reply does not have the scores that were asked for")
    for view, found in scores.items():
        if type(found) is not dict or set(found) != set(wanted[view]):
            raise BadMessage(f"its {view} scores are not of the data that were asked for")
        for split, row in found.items():
            wide = columns(split, expected.has_metric)
            if type(row) is not list or len(row) != wide or not all(map(_is_number, row)):
                raise BadMessage(f"its {view} scores of {split} data are not {wide} numbers")
            if not _is_count(row[2]) or row[2] > expected.counted[split]:
                raise BadMessage(
                    f"its {view} scores of {split} data are of {row[2]:g} samples, but it has {expected.counted[split]}"
                )
            if expected.has_classes and not 0 <= row[0] <= row[2] * (1 + 1e-6):
                raise BadMessage(f"its {view} scores of {split} data have {row[0]:g} right of {row[2]:g} samples")
    return scores


def _is_number(value: Any) -> bool:
    """True for a number that a float can hold, also NaN, as the loss of a model that has diverged."""
    return type(value) is float or (type(value) is int and abs(value) < LARGEST)


def _is_count(value: Any) -> bool:
    """True for a finite number that is not negative."""
    return _is_number(value) and 0 <= value < LARGEST


def said(answer: Message) -> str:
    """What a site says that has failed: it is short, and has no characters that move the cursor."""
    return text_of(answer.fields.get("why"))


def text_of(why: Any) -> str:
    """A site's sentence, fit to be shown."""
    return printable(why[:MAX_TEXT]) if isinstance(why, str) and why else "that it failed"
