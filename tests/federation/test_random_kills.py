"""Whatever is killed at whatever moment: a run gives the bytes of an undisturbed one.

FEDLOOM_KILLS=20 makes so many kills, FEDLOOM_SEED=7 repeats those of an earlier test; `make soak-federation`.
"""

import os
import random
import time

import pytest

pytest.importorskip("flwr")

from federation.deployment import SITES, reference, same_rounds

from fedloom import load

pytestmark = pytest.mark.federation

KILLS = int(os.environ.get("FEDLOOM_KILLS", "3"))
SEED = int(os.environ.get("FEDLOOM_SEED") or random.SystemRandom().randrange(10**6))
ROUNDS = 4 * max(8, KILLS)
ROUND_SECONDS = 2.0  # about
AWAY = 3.0  # seconds for which what was killed may stay away
METHOD = "ditto"  # both sides keep state


def test_random_kills_change_nothing(deployment):
    print(f"FEDLOOM_SEED={SEED} FEDLOOM_KILLS={KILLS}", flush=True)
    draw = random.Random(SEED)
    names = [*(f"site-{i}" for i in range(SITES)), "server"]

    def start(name):
        if name != "server":
            return deployment.join(int(name.removeprefix("site-")))
        terms = ("--deadline", "120", "--repeats", "9")
        return deployment.serve(METHOD, "--dataset", "digits", "--rounds", str(ROUNDS), *terms)

    server = [start(name) for name in names][-1]
    for after in sorted(draw.choices(range(ROUNDS - 1), k=KILLS)):  # 0: also while the run is prepared
        deployment.wait_for_round(after)
        time.sleep(draw.uniform(0, ROUND_SECONDS))
        name, whole = draw.choice(names), draw.random() < 0.5
        print(f"kill in round {deployment.rounds() + 1}: {name}{', with all that it has started' * whole}", flush=True)
        deployment.kill(name, whole=whole)
        time.sleep(draw.uniform(0, AWAY))
        restarted = start(name)
        server = restarted if name == "server" else server
    deployment.wait_for_round(ROUNDS)
    deployment.completed(server)
    same_rounds(load(deployment.out), reference(METHOD, rounds=ROUNDS))
