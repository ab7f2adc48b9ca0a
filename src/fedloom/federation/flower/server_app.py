"""Flower's ServerApp: carries out a run of FedLoom with the sites that are connected."""

from __future__ import annotations

import json
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedloom.config.resolve import resolve
from fedloom.federation.flower.link import FlowerLink
from fedloom.federation.serve import Server, Terms

JOB_FILE = "job.json"  # in the folder of a server: configuration, terms, and where the results go

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carry out, or continue, the run that the server's folder describes."""
    job = json.loads((Path(str(context.run_config["fedloom-server"])) / JOB_FILE).read_text())
    server, out = Server(FlowerLink(grid), Terms(**job["terms"])), job["out"]
    if job["clients"] is None:
        server.run(resolve(job["config"]), out=out, resume=True)
    else:
        server.run_on_own_data(job["config"], job["clients"], out=out, resume=True)
