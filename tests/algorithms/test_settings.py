"""Settings of methods that are out of range are refused with a sentence that names them."""

import pytest
from sentences import user_error

from fedloom.config.resolve import configure


@pytest.mark.parametrize(
    ("name", "setting", "value", "words"),
    [
        ("fedrod", "personal_head", "hype", ["personal_head", "hyper"]),
        ("fedrod", "hidden", 0, ["hidden must be at least 1"]),
        ("fedphp", "lam", 1.0, ["lam must be at most 0.9999"]),
        ("fedphp", "transfer", "mdm", ["transfer", "mmd"]),
        ("fedphp", "temperature", 0, ["temperature must be greater than 0"]),
        ("fedproto", "lam", -1, ["lam must be at least 0"]),
        ("fedala", "p", 0, ["p must be at least 1"]),
        ("fedala", "s", 101, ["s must be at most 100"]),
        ("fedala", "s", 0, ["s must be greater than 0"]),
        ("fml", "a", 1.5, ["a must be at most 1"]),
        ("moon", "tau", 0, ["tau must be greater than 0"]),
        ("moon", "proj", 0, ["proj must be at least 1"]),
        ("fedsam", "rho", -1, ["rho must be at least 0"]),
        ("feddyn", "alpha", 0, ["alpha must be greater than 0"]),
        ("fedrecon", "support", 0, ["support must be greater than 0"]),
        ("fedrecon", "support", 1, ["support must be at most 0.9"]),
        ("fedrecon", "recon_lr", 0, ["recon_lr must be greater than 0"]),
        ("fedrecon", "pseudo_clients", 0, ["pseudo_clients must be at least 1"]),
        ("per-fedavg", "inner_lr", -0.1, ["inner_lr must be at least 0"]),
        ("pfedme", "lam", 0, ["lam must be greater than 0"]),
        ("pfedme", "inner_steps", 0, ["inner_steps must be at least 1"]),
        ("pfedme", "eta_g", 0, ["eta_g must be greater than 0"]),
        ("lg-fedavg", "pretrain_rounds", -1, ["pretrain_rounds must be at least 0"]),
        ("plgu-lf", "D", -1, ["D must be at least 0"]),
        ("plgu-lf", "rho", -0.1, ["rho must be at least 0"]),
        ("plgu-grep", "p", 1, ["p must be greater than 1"]),
        ("fedfomo", "val_share", 0, ["val_share must be greater than 0"]),
        ("fedfomo", "eps", 2, ["eps must be at most 1"]),
        ("fedfomo", "M", -1, ["M must be at least 0"]),
    ],
)
def test_a_setting_out_of_range_is_refused(name, setting, value, words):
    with user_error(*words):
        configure(name, values={f"algorithm.{setting}": value})
