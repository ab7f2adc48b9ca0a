"""Differential privacy at a site: the secret of its noise, and an account of what it has given away in all runs."""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fedloom.core.errors import UserError
from fedloom.core.privacy import DELTA, UploadPrivacy, total_epsilon
from fedloom.core.tree import Tree, leaves
from fedloom.engine.privacy import Noise, secret_noise
from fedloom.storage.files import PRIVATE, make_folder, sync_folder, write_file

SECRET = "noise.key"
ACCOUNT = "uploads.txt"  # a line for every different upload: run, round, a checksum, and the noise
SECRET_BYTES = 32


class Upload(NamedTuple):
    """A line of the account."""

    run: str
    t: int
    digest: str
    noise: float


class SiteAccount:
    """What a site has given away by uploads with noise, in whatever run: a server cannot begin anew with another name.

    An upload that is sent again, because the first was lost, gives nothing away that the first has not; another one for
    the same round counts.
    """

    def __init__(self, folder: Path, limit: float | None = None) -> None:
        """`limit` is the epsilon that the site is willing to give away in all, with a delta of `DELTA`."""
        self.folder, self.limit = folder, limit

    def noise(self, order: bytes) -> Noise:
        """Noise that only this site can compute, for the answer to an order of which this is a digest."""
        path = self.folder / SECRET
        if not path.exists():
            make_folder(self.folder)
            write_file(path, lambda file: file.write(secrets.token_bytes(SECRET_BYTES)), PRIVATE)
        found = path.read_bytes()
        if len(found) != SECRET_BYTES:
            raise UserError(f"{path} is damaged; remove it.")
        return secret_noise(found, order)

    @property
    def epsilon(self) -> float:
        """What was given away so far."""
        return _epsilon(self.uploads())

    def release(self, run: str, t: int, up: Tree, privacy: UploadPrivacy) -> None:
        """Account for an upload before it is sent; raises UserError if it would give away too much."""
        made = hashlib.sha256()
        for v in leaves(up):
            made.update(v.cpu().contiguous().numpy().tobytes())
        upload, known = Upload(run, t, made.hexdigest(), privacy.noise), self.uploads()
        if upload in known:
            return
        after = _epsilon({*known, upload})
        if self.limit is not None and after > self.limit:
            raise UserError(
                f"another upload would make epsilon {after:.3g}, and this site gives away {self.limit:g} at most"
            )
        make_folder(self.folder)
        with (self.folder / ACCOUNT).open("a") as file:
            file.write("\n" * self._was_cut_off() + " ".join(map(str, upload)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.folder)

    def uploads(self) -> set[Upload]:
        """All that was sent; of a line that a failure has cut off, nothing was."""
        path, found = self.folder / ACCOUNT, set()
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(ValueError):
                run, t, digest, noise = line.split()
                found.add(Upload(run, int(t), digest, float(noise)))
        return found

    def _was_cut_off(self) -> bool:
        path = self.folder / ACCOUNT
        return path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")


def _epsilon(uploads: set[Upload]) -> float:
    return total_epsilon([upload.noise for upload in uploads], DELTA)


def check_limit(privacy: UploadPrivacy | None, limit: float | None) -> None:
    """Raise UserError if a site has a limit, and a run protects nothing."""
    if limit is not None and privacy is None:
        raise UserError(
            f"this site asks for an epsilon of {limit:g} at most, but the run has no differential privacy (dp_clip)"
        )
