"""Hosts for tests: network namespaces that are connected by a bridge, so that nothing is shared but the disk."""

import os
import subprocess
from contextlib import contextmanager

PREFIX = "10.77.0"


def ip(*arguments, check=True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


@contextmanager
def hosts(*names):
    """Hosts with an address each: name -> (address, command that starts a program there)."""
    switch = f"fl{os.getpid()}"
    spaces = {name: f"{switch}-{name}" for name in names}
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        found = {}
        for number, (name, space) in enumerate(spaces.items(), 1):
            ip("netns", "add", space)
            ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
            ip("-n", space, "address", "add", f"{PREFIX}.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", space, "link", "set", device, "up")
            found[name] = f"{PREFIX}.{number}", ("ip", "netns", "exec", space)
        yield found
    finally:
        for space in (*spaces.values(), switch):
            ip("netns", "delete", space, check=False)


def why_not() -> str | None:
    """Why there can be no hosts here; None if there can."""
    try:
        with hosts("probe") as found:
            subprocess.run([*found["probe"][1], "true"], check=True, capture_output=True)
    except FileNotFoundError:
        return "there is no iproute2"
    except subprocess.CalledProcessError as error:
        return f"no network namespaces can be made ({str(error.stderr).strip()})"
    return None
