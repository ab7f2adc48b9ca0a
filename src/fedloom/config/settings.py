"""The settings that every run has, whatever the method, data set, partition and model."""

from dataclasses import dataclass
from typing import Literal

from fedloom.core.settings import setting

# what other libraries call a setting, for the suggestion of an unknown name
SYNONYMS = {
    "learning_rate": "lr", "eta": "lr", "local_lr": "lr", "step_size": "lr",
    "epochs": "local_epochs", "local_ep": "local_epochs", "num_epochs": "local_epochs", "local_steps": "local_epochs",
    "num_clients": "clients", "n_clients": "clients", "num_users": "clients", "users": "clients",
    "num_rounds": "rounds", "n_rounds": "rounds", "global_rounds": "rounds", "communication_rounds": "rounds",
    "batch": "batch_size", "bs": "batch_size", "local_bs": "batch_size",
    "frac": "participation", "fraction_fit": "participation", "join_ratio": "participation",
    "random_state": "seed", "random_seed": "seed", "l2": "weight_decay", "wd": "weight_decay",
    "clip_norm": "clip", "max_grad_norm": "clip", "precision": "dtype",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The settings of a run that do not belong to its method, data set, partition or model."""

    clients: int = setting(20, "N, number of clients (where the data set leaves it open)", low=1)
    rounds: int = setting(50, "T, communication rounds", low=1, high=10**9)
    participation: float = setting(1.0, "share of clients in a round, or their number if above 1", above=0)
    participation_low: float | None = setting(
        None, "each round's share of clients is drawn anew, from this one to participation [always participation]",
        above=0, high=1,
    )  # fmt: skip
    lr: float = setting(0.05, "eta, local learning rate", above=0)
    momentum: float = setting(0.0, "momentum of local SGD", low=0, high=0.9999)
    optimizer: Literal["sgd", "adam", "adamw"] = setting("sgd", "of local training; it starts anew in every round")
    nesterov: bool = setting(False, "Nesterov's momentum instead of the usual one (sgd)")
    adam_betas: tuple[float, float] = setting((0.9, 0.999), "beta_1 and beta_2 of adam and adamw", low=0, high=0.999999)
    adam_eps: float = setting(1e-8, "epsilon of adam and adamw", above=0)
    lr_schedule: Literal["constant", "cosine", "step"] = setting(
        "constant", "learning rate over rounds: cosine falls to 0 in the end, step falls every lr_step rounds"
    )
    lr_warmup: int = setting(0, "first rounds, in which the learning rate rises linearly", low=0)
    lr_step: int = setting(30, "step: rounds after which the learning rate is multiplied by lr_gamma", low=1)
    lr_gamma: float = setting(0.1, "step: factor of the learning rate", above=0, high=1)
    weight_decay: float = setting(0.0, "weight decay of local SGD", low=0)
    clip: float | None = setting(None, "gradient norm is clipped to this", above=0)
    class_weight: Literal["none", "balanced"] = setting(
        "none", "balanced: each class of a client counts equally in its training loss, however rare it is"
    )
    huber: float | None = setting(
        None, "for numbers: errors beyond so many standard deviations count linearly (Huber's loss), not squared",
        above=0,
    )  # fmt: skip
    metric: str = setting("accuracy", "metric that selects the best round and ranks methods, see docs/metrics.md")
    batch_size: int = setting(10, "B, samples in a batch", low=1)
    local_epochs: int = setting(1, "E, passes over a client's data in a round", low=1, high=10**5)
    seed: int = setting(0, "random seed of initial model, client sampling, batches", low=0)
    partition_seed: int = setting(1, "random seed of the partition, independent of seed", low=0)
    split: tuple[float, float, float] = setting((0.7, 0.1, 0.2), "train/validation/test shares of a client's data")
    stratify: bool = setting(False, "each client's classes have the same shares in training, validation and test data")
    pool: Literal["merged", "train", "separate"] = setting(
        "merged",
        "divided among clients: merged, all samples; train, the official training set (the official test set goes to "
        "the server); separate, both, each by itself",
    )
    subset: int | None = setting(None, "keep so many clients of the partition, drawn at random", low=1)
    server_share: float = setting(0.0, "share of the samples that goes to the server (D_CS)", low=0, high=0.9)
    dcs_holdout: float = setting(
        0.0, "share of the server's samples (D_CS) that only test the global model; page learns from the rest",
        low=0, high=0.9,
    )  # fmt: skip
    screening: bool = setting(True, "leave out uploads that are far larger than usual (see docs/robustness.md)")
    screen_directions: bool = setting(
        False, "leave out clients whose updates point away from those of others in the first rounds"
    )
    aggregation: Literal["mean", "median", "trimmed_mean"] = setting(
        "mean", "where the server averages: the method's mean, or median or trimmed mean of each coordinate, unweighted"
    )
    server_optimizer: Literal["none", "momentum", "adam", "yogi", "adagrad"] = setting(
        "none", "where the server averages: its step, with the change of the average as gradient (FedAvgM, FedOpt)"
    )
    server_lr: float | None = setting(None, "eta of the server optimizer (none: 1 for momentum, else 0.01)", above=0)
    server_betas: tuple[float, float] = setting((0.9, 0.99), "beta_1 (momentum) and beta_2 of it", low=0, high=0.999999)
    server_tau: float = setting(1e-3, "tau of it: how little it adapts to coordinates", above=0)
    trim: float | None = setting(
        None, "trimmed_mean: share of values left out at either end (none: 0.2)", above=0, high=0.5
    )
    clip_updates: float | None = setting(
        None, "scale updates that are larger than this many times the usual size down to it", above=0
    )
    dp_clip: float | None = setting(
        None, "differential privacy of uploads: norm to which every update is clipped (see docs/privacy.md)", above=0
    )
    dp_noise: float | None = setting(
        None, "dp_clip: standard deviation of the noise in an update, in units of dp_clip (none: 1)", above=0
    )
    dp_delta: float | None = setting(
        None, "dp_clip: probability with which the guarantee may fail (none: 1e-5)", above=0, high=0.5
    )
    eval_every: int = setting(1, "rounds between evaluations", low=1)
    early_stopping: int | None = setting(
        None, "end the run after so many rounds without a better metric on validation data", low=1
    )
    min_delta: float = setting(0.0, "early_stopping: how much better it must be, in the metric's unit", low=0)
    eval_clients: int | None = setting(None, "evaluate a fixed random sample of so many clients, not all", low=1)
    holdout_clients: float = setting(0.0, "share (or number, from 1 on) of the clients kept out of training", low=0)
    join_rounds: int = setting(1, "rounds in which a held-out client takes part to be counted as joined", low=1)
    dtype: Literal["float32", "float64", "tf32", "bf16"] = setting(
        "float32", "precision; tf32 and bf16: parameters in float32, products in lower precision, faster on a GPU"
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    deterministic: bool = setting(False, "on a GPU, use only algorithms that give the same bits every time")
    engine: Literal["vectorized", "ray", "reference"] = setting(
        "vectorized",
        "vectorized: as plan says; ray: the same in several processes or on several GPUs, see docs/cluster.md; "
        "reference: one client after another, untraced, to check others against",
    )
    actors: int | None = setting(None, "ray: number of processes that train clients; none: one per GPU or core", low=1)
    plan: Literal["auto", "stacked", "stacked-eager", "per-client"] = setting(
        "auto", "auto (fastest by timing), stacked, stacked-eager (without traced graphs) or per-client"
    )
    keep: Literal["best", "last", "none"] = setting(
        "best",
        "models of the clients that are kept: of the round that is best on validation data and of the last, of the "
        "last only, or none",
    )
    memory: str | None = setting(
        None, "memory of the device that the run may use, such as 3GB or 800MB; clients are computed in smaller groups"
    )
    store: Literal["auto", "memory", "disk"] = setting("auto", "where the clients' private state is kept")
    checkpoint_every: int | None = setting(
        None, "rounds between checkpoints; none: by time, at most 5 % of the run", low=1
    )
