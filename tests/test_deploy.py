"""The files for containers and services: their commands are right, and tools that know these files accept them."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from fedloom.cli.commands import app

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
PROGRAM = typer.main.get_command(app)


def check(arguments):
    """The command with these arguments can be parsed."""
    context = PROGRAM.make_context("fedloom", list(arguments))
    command = PROGRAM.get_command(context, arguments[0])
    command.make_context(arguments[0], [str(argument) for argument in arguments[1:]], parent=context)


def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_a_server_and_three_sites_in_containers():
    services = compose()["services"]
    assert set(services) == {"server", "site-0", "site-1", "site-2"}
    assert {service["command"][0] for service in services.values()} == {"serve", "join"}
    for service in services.values():
        check(service["command"])
    folders = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    assert len(folders) == len(set(folders)) == 5  # no container sees what another has


def compose_program():
    """The compose command of Docker, or its older program; None if there is neither."""
    docker, older = shutil.which("docker"), shutil.which("docker-compose")
    if docker is not None and not subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        return [docker, "compose"]
    return None if older is None else [older]


def test_docker_accepts_the_file():
    program = compose_program()
    if program is None:
        pytest.skip("there is no docker compose")
    command = [*program, "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_commands_in_comments():
    lines = [line.strip("# ") for path in DEPLOY.iterdir() for line in path.read_text().splitlines()]
    found = [line.partition(" fedloom ")[2] for line in lines if line.startswith("docker run")]
    assert found
    for line in found:
        check(shlex.split(line))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_services(path):
    (line,) = re.findall(r"^ExecStart=\S+/fedloom (.+)$", path.read_text(), re.MULTILINE)
    check(shlex.split(line))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_services(path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd")
    done = subprocess.run([analyze, "verify", str(path)], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if path.name in line and "is not executable" not in line]
    assert said == []
