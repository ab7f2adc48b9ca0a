"""Local training: a second implementation."""

from helpers import client_state, method
from oracles import assert_near, full_batch_run


def test_local_against_plain_pytorch():
    run, plain = full_batch_run(method("local"))
    models = [plain.initial] * len(plain.sizes)
    for _ in range(3):
        models = [plain.fit(models[i], plain.train[i]) for i in plain.clients]
        run.advance(evaluate=False)
    for i in plain.clients:
        assert_near(client_state(run, "theta", i), models[i])
