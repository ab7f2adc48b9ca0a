"""Flower's ServerApp: carries out a run of FedLoom with the sites that are connected."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedloom.config.resolve import resolve
from fedloom.core.errors import UserError
from fedloom.core.preprocessing import Preprocessing
from fedloom.deployment.flower.link import FlowerLink
from fedloom.deployment.flower.status import Sites
from fedloom.deployment.serve import Server, Terms
from fedloom.storage.files import json_writer, text_writer, write_file

JOB_FILE = "job.json"  # in the folder of a server: configuration, terms, and where the results go
END_FILE = "end.json"  # there when the run has ended, with the sentence that says why if it has failed
FAILURE_FILE = "failure.txt"  # where Python was when something failed that nobody foresaw

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carry out, or continue, the run that the server's folder describes."""
    folder = Path(str(context.run_config["fedloom-server"]))
    job = json.loads((folder / JOB_FILE).read_text())
    server, out = Server(FlowerLink(grid, status=Sites(folder)), Terms(**job["terms"])), job["out"]
    error: str | None = "The server's program was stopped."
    try:
        if job["clients"] is None:
            server.run(resolve(job["config"]), out=out, resume=True)
        else:
            schema = None if job.get("schema") is None else Preprocessing.from_json(job["schema"])
            server.run_on_own_data(job["config"], job["clients"], out=out, resume=True, schema=schema)
        error = None
    except UserError as wrong:
        error = str(wrong)
        raise
    except Exception as wrong:
        write_file(folder / FAILURE_FILE, text_writer(traceback.format_exc()))
        error = f"The server's program has failed with {type(wrong).__name__}: {wrong}; see {folder / FAILURE_FILE}."
        raise
    finally:
        write_file(folder / END_FILE, json_writer({"error": error}))
